"""The launches of the attention kernels on this GPU: each choice of box, warps and stages, timed (kernels/cards.py).

    python examples/benchmarks/calibrate_cards.py  # heads of 128
    python examples/benchmarks/calibrate_cards.py --dim 256 --kinds decode_64 prefill
    TRITON_OVERRIDE_ARCH=sm120 python examples/benchmarks/calibrate_cards.py  # the code for another card, on this one
    TRITON_OVERRIDE_ARCH=sm120 python examples/benchmarks/calibrate_cards.py --tight  # and within that card's memory

For each kind of launch one thing is varied, and all others stay as the table has them. The fastest choices come first.
Every choice is checked before it is timed. What each takes on chip is asked of the compiler: docs/kernels-by-card.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import bench_decode_attention as decode
import bench_prefill_attention as prefill
import common
import torch
from attention import Problem, decode_batch, prefill_batch
from triton.compiler.compiler import CompiledKernel, make_backend

from hf_batchllm.kernels import cards
from hf_batchllm.kernels.triton import prefill_triton

LINES = {"decode_16": (16,), "decode_64": (64,), "prefill": (64, 128)}
BATCHES = {"decode_16": ["256x1:0+1024", "64x4:2000+250"], "decode_64": ["16x16:2000+250"], "prefill": ["4x2048"]}
LAUNCH = ("lines", "warps", "stages", "box")
BOXES, WARPS, STAGES = (32, 64), (2, 4, 8), (1, 2, 3)


def keep_within(card: cards.Card) -> None:
    """Let a multiprocessor have as few blocks at once as that of ``card``: each asks for more memory than it needs."""
    plain, here = CompiledKernel.__init__, torch.cuda.get_device_properties(torch.cuda.current_device())

    def made(kernel: Any, *given: Any, **named: Any) -> None:
        plain(kernel, *given, **named)
        shared = kernel.metadata.shared
        if not shared:
            return
        blocks = card.multiprocessor_memory // (shared + 1024)  # 1 KB of each block is CUDA's own
        most = here.shared_memory_per_multiprocessor // blocks - 1024 if shared <= card.shared_memory else 1 << 20
        shared = max(shared, most // 128 * 128)
        kernel.metadata = kernel.metadata._replace(shared=shared)
        kernel.packed_metadata = make_backend(kernel.metadata.target).pack_metadata(kernel.metadata)

    CompiledKernel.__init__ = made


def timed(kind: str, inputs: list[Any], dim: int) -> list[float]:
    """Milliseconds for each batch."""
    if kind != "prefill":
        return [decode.measure(each)["ms"] for each in inputs]
    options = prefill_triton.launch_options(4, dim, dim, 2)
    options.pop("wide", None)
    return [prefill.measure(each, options, replays=9)["ms"] for each in inputs]


def main(arguments: Sequence[str] | None = None) -> None:
    flags: common.Flags = {
        "--kinds": {"nargs": "+", "choices": LINES, "default": list(LINES)},
        "--tight": {"action": "store_true", "help": "with the memory on chip of the card in the table"},
    }
    options = common.read(__doc__, arguments, flags, on="gpu", dim=(128, "of heads; there are 32, and 8 KV heads"))
    torch.manual_seed(0)
    common.warm_branches()
    device = torch.device("cuda", torch.cuda.current_device())
    capability = cards.capability_on(device)
    assert capability is not None
    card = cards.card_on(device)
    if options.tight:
        keep_within(card)
    print(f"{torch.cuda.get_device_name()}, compiled for {capability}; {options.dim} dimensions")
    made: dict[str, Any] = {}
    for kind in options.kinds:
        names = BATCHES[kind]
        for name in set(names) - made.keys():
            batch = prefill_batch(name) if kind == "prefill" else decode_batch(name)
            made[name] = Problem.make(batch, 32, 8, options.dim, 3)
        inputs = [made[name] for name in names]
        rows = []
        for launched in product(LINES[kind], WARPS, STAGES, BOXES):
            launch = cards.Launch(*launched)
            used = launch == getattr(card, kind).of(options.dim)
            cards.CARDS[capability] = replace(card, **{kind: replace(getattr(card, kind), narrow=launch, wide=launch)})
            cards.card_on.cache_clear()
            try:
                times = timed(kind, inputs, options.dim)
            except Exception as error:  # some do not fit the card
                print(f"{launch}: {type(error).__name__}: {str(error)[:80]}")
                continue
            launch_of = dict(zip(LAUNCH, launched, strict=True))
            rows.append({**launch_of, **dict(zip(names, times, strict=True)), "": "in use" if used else ""})
        print(kind)
        table = common.Table({**dict.fromkeys(LAUNCH, "6"), **dict.fromkeys(names, "14.4f"), "": "<6"})
        for row in sorted(rows, key=lambda row: sum(row[name] for name in names)):
            table.add(row)


if __name__ == "__main__":
    main()
