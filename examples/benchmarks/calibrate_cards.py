"""The launches of the attention kernels on this GPU: each choice of box, warps and stages, timed (kernels/cards.py).

    python examples/benchmarks/calibrate_cards.py  # heads of 128
    python examples/benchmarks/calibrate_cards.py --dim 256 --kinds decode_64 prefill
    TRITON_OVERRIDE_ARCH=sm120 python examples/benchmarks/calibrate_cards.py  # the code for another card, on this one

For each kind of launch one thing is varied, and all others stay as the table has them. The fastest choices come first.
Every choice is checked before it is timed. What each takes on chip is asked of the compiler: docs/kernels-by-card.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from typing import Any

import bench_decode_attention as decode
import bench_prefill_attention as prefill
import torch
from bench_support.attention_batches import DecodeBatch, PrefillBatch
from bench_support.gpu_timing import need_gpu, warm_branches

from hf_batchllm.kernels import cards, prefill_triton

LINES = {"decode_16": 16, "decode_64": 64, "prefill": 64}
BATCHES = {"decode_16": ["256x1:0+1024", "64x4:2000+250"], "decode_64": ["16x16:2000+250"], "prefill": ["4x2048"]}
BOXES, WARPS, STAGES = (32, 64), (2, 4, 8), (1, 2, 3)


def timed(kind: str, inputs: list[Any], dim: int) -> list[float]:
    """Milliseconds for each batch."""
    if kind != "prefill":
        return [decode.measure(each)["ms"] for each in inputs]
    options = prefill_triton.launch_options(4, dim, dim, 2)
    options.pop("wide", None)
    return [prefill.measure(each, options, replays=9)["ms"] for each in inputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=128, help="of heads; there are 32, and 8 KV heads")
    parser.add_argument("--kinds", nargs="+", choices=LINES, default=list(LINES))
    options = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    warm_branches()
    device = torch.device("cuda", torch.cuda.current_device())
    capability = cards.capability_on(device)
    assert capability is not None
    card = cards.card_on(device)
    print(f"{torch.cuda.get_device_name()}, compiled for {capability}; {options.dim} dimensions")
    made: dict[str, Any] = {}
    for kind in options.kinds:
        names = BATCHES[kind]
        for name in set(names) - made.keys():
            if kind == "prefill":
                made[name] = prefill.Inputs.make(PrefillBatch.parse(name), 32, 8, options.dim, 3)
            else:
                made[name] = decode.Inputs.make(DecodeBatch.parse(name), 32, 8, options.dim, 3)
        inputs = [made[name] for name in names]
        print(f"{kind}\n    box  warps  stages  " + "  ".join(names))
        rows = []
        for box, warps, stages in product(BOXES, WARPS, STAGES):
            launch = cards.Launch(LINES[kind], warps, stages)
            both = replace(getattr(card, kind), narrow=launch, wide=launch)
            tried = replace(card, longest_box=box, **{kind: both})
            used = box == card.longest_box and launch == getattr(card, kind).of(options.dim)
            cards.CARDS[capability] = tried
            cards.card_on.cache_clear()
            try:
                times = timed(kind, inputs, options.dim)
            except Exception as error:  # some do not fit the card
                print(f"box {box}, warps {warps}, stages {stages}: {type(error).__name__}: {str(error)[:80]}")
                continue
            rows.append((sum(times), f"{box:7} {warps:6} {stages:7}", times, used))
        for _, text, times, used in sorted(rows):
            print(text + "  ".join(f"{each:9.4f}" for each in times) + ("  in use" if used else ""), flush=True)


if __name__ == "__main__":
    main()
