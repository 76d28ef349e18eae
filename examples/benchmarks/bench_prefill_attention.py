"""How fast prefill attention over paged caches is on this GPU, beside other libraries.

    python examples/benchmarks/bench_prefill_attention.py  # the four default batches
    python examples/benchmarks/bench_prefill_attention.py 8x1024 4x2000+16x200 1x2048@6144
    python examples/benchmarks/bench_prefill_attention.py --rivals none  # ours alone; else torch's, FlashInfer, ...
    python examples/benchmarks/bench_prefill_attention.py --tiles 64,4,3 128,8,3  # tile, warps, stages, never in Gluon

A batch is one prefill step of one layer: chunks x rows (4x2048). Each chunk may have members x rows that read it as
their prefix in the same step (4x2000+16x200), or tokens computed in earlier steps (1x2048@6144). Only the operations of
the (row, key) pairs that causality needs count. "floor" is the floor's share of the time: see
attention.py; attention_rivals.py explains what the rivals get. Times are medians of
replays of a CUDA graph that goes over several caches in turn; pages lie scattered over the caches. Every configuration
is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attention_libraries as rivals
import common
import torch
from attention import PAGE, Problem, floor_ms, prefill_batch, read
from attention_rivals import time_rival

from hf_batchllm.kernels.lists import work_lists as wl
from hf_batchllm.kernels.triton import prefill_triton as pt

DEFAULT = ["8x1024", "4x2048", "1x8192", "4x2000+16x200"]


def measure(given: Problem, options: dict[str, int], replays: int) -> dict[str, float]:
    """Milliseconds for one step, its error, and the tile that was used."""
    q, kv_heads = given.q, given.kv_heads
    work = wl.build_prefill(
        given.batch.layout, group=q.shape[1] // kv_heads, page_size=PAGE,
        tile=options["tile"], wide=options.get("wide"), kv_heads=kv_heads,
    ).to("cuda")  # fmt: skip
    out = torch.full_like(q, float("nan"))

    def step(k: torch.Tensor, v: torch.Tensor) -> None:
        pt.attend_chunks(q, k, v, out, work, given.dim**-0.5, options=options)

    step(*given.caches[0])
    error = given.check(out)
    ms = common.graph_ms(lambda: [step(k, v) for k, v in given.caches], replays) / len(given.caches)
    return {"ms": ms, "error": error, "tile": work.tile}


def kernels(wide: bool) -> list[Any]:
    """The compiled versions of the kernel, or of the one for wide tiles, so far."""
    module = pt.for_hopper() if wide else pt
    return list(module._attend_chunks.device_caches[torch.cuda.current_device()][0].values())


def profile(kernel: Any) -> dict[str, float]:
    """Registers, words spilled, shared memory and blocks on a multiprocessor of a compiled kernel."""
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    blocks = min(65536 // (-(-kernel.n_regs // 8) * 8 * 32 * warps), 233472 // (shared + 1024), 64 // warps)
    return {"regs": kernel.n_regs, "spills": kernel.n_spills, "KB": shared / 1024, "blocks": blocks}


def main(arguments: Sequence[str] | None = None) -> None:
    more: common.Flags = {
        "batches": {"nargs": "*", "type": prefill_batch, "default": [prefill_batch(text) for text in DEFAULT]},
        "--tiles": {"nargs": "+", "help": "TILE,WARPS,STAGES: others than the kernel would choose"},
    }
    options, rates = read(__doc__, arguments, "all", rivals.PREFILL, 15, **more)
    names, missing = rivals.chosen(options.rivals, rivals.PREFILL)
    chosen = pt.launch_options(options.heads // options.kv_heads, options.dim, options.dim, 2)
    named = ("tile", "num_warps", "num_stages")
    tiles = [dict(zip(named, map(int, text.split(",")), strict=True)) for text in options.tiles or []] or [chosen]
    print("TFLOP/s of each; -: a rival is not made for such a batch")
    columns = {"batch": ">16", "tile": ">9", "ms": "7.4f", "TFLOP/s": "7.0f", "floor": "6.1%", "error": "7.1e"}
    columns |= {"regs": "5", "spills": "6", "KB": "6.0f", "blocks": "6", **dict.fromkeys(names, ">10")}
    table, notes = common.Table(columns), [f"not installed: {', '.join(missing)}"] if missing else []
    profiles: dict[str, dict[str, float]] = {}
    for batch in options.batches:
        given = Problem.make(batch, options.heads, options.kv_heads, options.dim, options.caches)
        moved, computed = given.least
        floor = floor_ms(moved, computed, rates.copy, rates.operations)
        others: dict[str, str] = {}
        for tile in tiles:
            name = ",".join(str(tile[part]) for part in named)
            try:
                found = measure(given, tile, options.replays)
            except Exception as error:  # some candidates may not fit the card
                notes.append(f"{batch}, {name}: {type(error).__name__}: {str(error)[:150]}")
                continue
            wide = found["tile"] == tile.get("wide")
            name = f"{tile['wide']}, wide" if wide else name
            if name not in profiles:
                profiles[name] = profile(kernels(wide)[-1])
            for rival in names if not others else ():  # beside the first tile
                outcome = time_rival(rivals.PREFILL[rival], given, options.replays)
                notes += [f"{batch}, {rival}, {note}" for note in outcome.notes if not outcome.unfit]
                others[rival] = f"{computed / outcome.ms / 1e9:.0f}" if outcome.ms else str(outcome)
            speed = {"TFLOP/s": computed / found["ms"] / 1e9, "floor": floor / found["ms"]}
            table.add({**found, "batch": str(batch), "tile": name, **speed, **profiles[name], **others})
        del given
    print(*notes, sep="\n")
    table.write(options.json, rates=vars(rates), notes=notes)


if __name__ == "__main__":
    main()
