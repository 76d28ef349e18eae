"""How fast decode attention over many shared prefixes is on this GPU, beside the floor and other libraries.

    python examples/benchmarks/bench_decode_attention.py  # the default batches
    python examples/benchmarks/bench_decode_attention.py 16x16:2000+250  # groups x rows : shared + own tokens
    python examples/benchmarks/bench_decode_attention.py --rivals all  # torch, FlashInfer, ... where installed
    python examples/benchmarks/bench_decode_attention.py --json figures.json

attention.py explains how batches are written and how the floor is worked out; attention_rivals.py, what rivals get. A
batch is one decode step of one layer in a CUDA graph: the segment and own launches on parallel branches, then the
merge. Prefixes become segments where the gate of kernels/lists/ranges.py lets them. Each graph goes over several caches
in turn, so that nothing stays in L2, and the time is the median of its replays. Pages lie scattered over the caches.
Every batch is checked before it is timed.

"GB/s" counts the K and V bytes of each token once, however many rows read it; "copy" is the share of a device-to-device
copy's rate (bytes read + bytes written); "floor" is the floor's share of the time. "off" is the time if every row reads
all of its tokens by itself. random:40 should reach 60 % of copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attention_libraries as rivals
import common
import numpy as np
import torch
from attention import NEVER, PAGE, Problem, decode_batch, floor_ms, read
from attention_rivals import time_rival

from hf_batchllm.bench.floor import Rates
from hf_batchllm.kernels.lists import work_lists as wl
from hf_batchllm.kernels.lists.ranges import GATE, GATE_MERGED
from hf_batchllm.kernels.triton import decode_triton as ct

DEFAULT = ["16x16:2000+250", "64x4:2000+250", "1x64:32000+128", "256x1:0+1024", "random:40"]
LEAST_SHARES = {"random:40": 0.6}  # of a copy's rate that a batch should reach


def measure(
    given: Problem,
    *,
    gate: float = GATE,
    gate_merged: float = GATE_MERGED,
    most_pages: int | None = None,
    replays: int = 25,
) -> dict[str, float]:
    """Milliseconds of a step, and its error."""
    batch, q, heads = given.batch, given.q, given.q.shape[1]
    work = wl.build_work(
        batch.ranges(gate, gate_merged, given.window),
        batch.lengths,
        kv_heads=given.kv_heads,
        group=heads // given.kv_heads,
        page_size=PAGE,
        multiprocessors=torch.cuda.get_device_properties(q.device).multi_processor_count,
        most_pages=most_pages,
        window=given.window,
    ).to("cuda")
    lengths, out = torch.from_numpy(batch.lengths.astype(np.int32)).cuda(), torch.empty_like(q)
    part_out = torch.empty(work.parts, heads, given.dim, device="cuda")
    part_lse = torch.empty(work.parts, heads, device="cuda")
    # Made one right after the other: torch hands out the same few streams in turn, and two branches on the same
    # stream would not run in parallel.
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    assert main != side

    def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Long items come first, on the capturing stream: otherwise short items fill the card, and the long ones
        # end alone.
        side.wait_stream(main)
        for tile, stream in zip(sorted(work.items, reverse=True), (main, side), strict=False):
            with torch.cuda.stream(stream):
                inputs = q, k, v, out, part_out, part_lse, work, lengths, given.dim**-0.5
                ct.attend_items(tile, *inputs, window=given.window)
        main.wait_stream(side)
        if work.merges:
            with torch.cuda.stream(main):
                ct.merge_parts(out, part_out, part_lse, work)
        return out

    out.fill_(float("nan"))
    torch.cuda.synchronize()
    step(*given.caches[0])
    torch.cuda.synchronize()
    error = given.check(out)
    ms = common.graph_ms(lambda: [step(k, v) for k, v in given.caches], replays, main) / len(given.caches)
    return {"ms": ms, "error": error, "parts": work.parts}


def report(given: Problem, rates: Rates, replays: int) -> dict[str, Any]:
    batch, found = given.batch, measure(given, replays=replays)
    ms, (moved, computed) = found["ms"], given.least
    off = measure(given, gate=NEVER, gate_merged=NEVER, replays=replays)["ms"] if batch.shares else ms
    figures = {"batch": str(batch), "rows": batch.total_rows, **found, "GB/s": moved / ms / 1e6, "off, ms": off}
    figures |= {"copy": moved / ms * 1e3 / rates.copy, "TFLOP/s": computed / ms / 1e9, "ratio": off / ms}
    return figures | {"floor": floor_ms(moved, computed, rates.copy, rates.operations) / ms}


def main(arguments: Sequence[str] | None = None) -> None:
    batches = {"nargs": "*", "type": decode_batch, "default": [decode_batch(text) for text in DEFAULT]}
    asked, rates = read(__doc__, arguments, "none", rivals.DECODE, 25, batches=batches)
    names, missing = rivals.chosen(asked.rivals, rivals.DECODE)
    columns = {"batch": ">16", "rows": "5", "ms": "7.4f", "GB/s": "5.0f", "copy": "6.1%", "TFLOP/s": "7.0f"}
    columns |= {"floor": "6.1%", "off, ms": "8.4f", "ratio": "5.2f", **dict.fromkeys(names, ">10")}
    table, notes = common.Table(columns), [f"not installed: {', '.join(missing)}"] if missing else []
    for batch in asked.batches:
        given = Problem.make(batch, asked.heads, asked.kv_heads, asked.dim, asked.caches)
        found = report(given, rates, asked.replays)
        for name in names:
            outcome = time_rival(rivals.DECODE[name], given, replays=9)
            found[name] = str(outcome)
            notes += [f"{batch}, {name}, {note}" for note in outcome.notes if not outcome.unfit]
        table.add(found)
        if least := LEAST_SHARES.get(str(batch)):
            notes.append(f"{batch}: {found['copy']:.1%} of copy; at least {least:.0%} are wanted")
        del given
    print(*notes, sep="\n")
    table.write(asked.json, rates=vars(rates), notes=notes)


if __name__ == "__main__":
    main()
