"""How fast decode attention over many shared prefixes is on this GPU, beside the floor and other libraries.

    python examples/benchmarks/bench_decode_attention.py  # the default batches
    python examples/benchmarks/bench_decode_attention.py 16x16:2000+250  # groups x rows : shared + own tokens
    python examples/benchmarks/bench_decode_attention.py --rivals all  # torch, FlashInfer, ... where installed
    python examples/benchmarks/bench_decode_attention.py --json figures.json

attention.py explains how batches are written and how the floor is worked out; attention_rivals.py, what rivals get. A
batch is one decode step of one layer in a CUDA graph: the segment and own launches on parallel branches, then the
merge. Prefixes become segments where the gate of kernels/ranges.py lets them. Each graph goes over several caches in
turn, so that nothing stays in L2, and the time is the median of its replays. Pages lie scattered over the caches. Every
batch is checked before it is timed.

"GB/s" counts the K and V bytes of each token once, however many rows read it; "copy" is the share of a device-to-device
copy's rate (bytes read + bytes written); "floor" is the floor's share of the time. "off" is the time if every row reads
all of its tokens by itself. random:40 should reach 60 % of copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import attention_rivals as rivals
import common
import numpy as np
import torch
from attention import NEVER, PAGE, Problem, add_attention, begin, floor_ms, operations, unique_bytes
from attention import DecodeBatch as Batch

from hf_batchllm.bench.floor import Rates
from hf_batchllm.kernels import decode_triton as ct
from hf_batchllm.kernels import work_lists as wl
from hf_batchllm.kernels.ranges import GATE, GATE_MERGED

DEFAULT = ["16x16:2000+250", "64x4:2000+250", "1x64:32000+128", "256x1:0+1024", "random:40"]
LEAST_SHARES = {"random:40": 0.6}  # of a copy's rate that a batch should reach
TOLERANCE = rivals.TOLERANCE


@dataclass
class Inputs:
    """Several caches with the same page table."""

    batch: Batch
    heads: int
    q: torch.Tensor  # [rows, heads, dim]
    caches: list[tuple[torch.Tensor, torch.Tensor]]  # each [pages, PAGE, kv_heads, dim]
    lengths: torch.Tensor  # [rows]
    want: torch.Tensor  # [rows, heads, dim] float32  of the first cache
    window: int | None

    @classmethod
    def make(cls, batch: Batch, heads: int, kv_heads: int, dim: int, caches: int, window: int | None = None) -> Inputs:
        def cache() -> torch.Tensor:
            return torch.randn(batch.pages, PAGE, kv_heads, dim, dtype=torch.bfloat16, device="cuda")

        q = torch.randn(batch.total_rows, heads, dim, dtype=torch.bfloat16, device="cuda")
        pairs = [(cache(), cache()) for _ in range(caches)]
        lengths = torch.from_numpy(batch.lengths.astype(np.int32)).cuda()
        return cls(batch, heads, q, pairs, lengths, reference(batch, q, *pairs[0], window), window)

    @property
    def problem(self) -> Problem:
        """The same inputs for rivals."""
        batch = self.batch
        rows = np.ones(batch.total_rows, dtype=np.int64)
        return Problem(self.q, self.caches, self.want, batch.slots, rows, batch.outer + batch.shared, batch.degrees)


def reference(batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    k, v = k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])  # [slots, kv_heads, dim]
    slots = [each[-window:] if window else each for each in batch.slots]
    places = torch.from_numpy(np.concatenate(slots)).to(k.device)
    out = []
    for query, place in zip(q, places.split([len(each) for each in slots]), strict=True):
        keys, values = k[place].float(), v[place].float()
        query = query.float().view(k.shape[1], -1, k.shape[2])
        weights = torch.einsum("hgd,khd->hgk", query * k.shape[2] ** -0.5, keys).softmax(-1)
        out.append(torch.einsum("hgk,khd->hgd", weights, values).flatten(0, 1))
    return torch.stack(out)


def measure(
    inputs: Inputs,
    *,
    gate: float = GATE,
    gate_merged: float = GATE_MERGED,
    most_pages: int | None = None,
    parallel: bool = True,
    only: tuple[str, ...] = (),
    capacity: int = 1,
    replays: int = 25,
) -> dict[str, float]:
    """Milliseconds of a step, and its error. ``only``: the launches to time, without the check; all if empty."""
    batch = inputs.batch
    kv_heads, dim = inputs.caches[0][0].shape[2:]
    work = wl.build_work(
        batch.ranges(gate, gate_merged, inputs.window),
        batch.lengths,
        kv_heads=kv_heads,
        group=inputs.heads // kv_heads,
        page_size=PAGE,
        multiprocessors=torch.cuda.get_device_properties(inputs.q.device).multi_processor_count,
        most_pages=most_pages,
        window=inputs.window,
        capacity=capacity,
    ).to("cuda")
    out = torch.empty_like(inputs.q)
    part_out = torch.empty(work.parts, inputs.heads, dim, device="cuda")
    part_lse = torch.empty(work.parts, inputs.heads, device="cuda")
    tiles = sorted(work.items, reverse=True)
    # Made one right after the other: torch hands out the same few streams in turn, and two branches on the same
    # stream would not run in parallel.
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    assert main != side

    def step(k: torch.Tensor, v: torch.Tensor) -> None:
        # Long items come first, on the capturing stream: otherwise short items fill the card, and the long ones
        # end alone.
        branches = [main, side if parallel else main]
        side.wait_stream(main)
        for tile, stream in zip(tiles, branches, strict=False):
            if not only or str(tile) in only:
                with torch.cuda.stream(stream):
                    given = inputs.q, k, v, out, part_out, part_lse, work, inputs.lengths, dim**-0.5
                    ct.attend_items(tile, *given, window=inputs.window)
        main.wait_stream(side)
        if work.merges and (not only or "merge" in only):
            with torch.cuda.stream(main):
                ct.merge_parts(out, part_out, part_lse, work)

    def steps() -> None:
        for k, v in inputs.caches:
            step(k, v)

    out.fill_(float("nan"))
    torch.cuda.synchronize()
    step(*inputs.caches[0])
    torch.cuda.synchronize()
    error = float((out.float() - inputs.want).norm() / inputs.want.norm())
    if not only and not error < TOLERANCE:
        raise AssertionError(f"{batch}: error {error}")
    return {"ms": common.graph_ms(steps, replays, main) / len(inputs.caches), "error": error, "parts": work.parts}


def report(inputs: Inputs, rates: Rates, replays: int) -> dict[str, Any]:
    batch, (kv_heads, dim) = inputs.batch, inputs.caches[0][0].shape[2:]
    found = measure(inputs, replays=replays)
    ms = found["ms"]
    moved, computed = unique_bytes(batch.unique_tokens, kv_heads, dim), operations(batch.pairs, inputs.heads, dim)
    off = measure(inputs, gate=NEVER, gate_merged=NEVER, replays=replays)["ms"] if batch.shares else ms
    figures = {"batch": str(batch), "rows": batch.total_rows, **found, "GB/s": moved / ms / 1e6, "off, ms": off}
    figures |= {"copy": moved / ms * 1e3 / rates.copy, "TFLOP/s": computed / ms / 1e9, "ratio": off / ms}
    return figures | {"floor": floor_ms(moved, computed, rates.copy, rates.operations) / ms}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = common.parser_of(__doc__)
    parser.add_argument("batches", nargs="*", type=Batch.parse, default=[Batch.parse(text) for text in DEFAULT])
    add_attention(parser, "none", rivals.DECODE)
    parser.set_defaults(replays=25)
    options = parser.parse_args(arguments)
    rates = begin(options)
    names, missing = rivals.chosen(options.rivals, rivals.DECODE)
    columns = {"batch": ">16", "rows": "5", "ms": "7.4f", "GB/s": "5.0f", "copy": "6.1%", "TFLOP/s": "7.0f"}
    columns |= {"floor": "6.1%", "off, ms": "8.4f", "ratio": "5.2f", **dict.fromkeys(names, ">10")}
    table, notes = common.Table(columns), [f"not installed: {', '.join(missing)}"] if missing else []
    for batch in options.batches:
        inputs = Inputs.make(batch, options.heads, options.kv_heads, options.dim, options.caches)
        found, problem = report(inputs, rates, options.replays), inputs.problem
        for name in names:
            outcome = rivals.time_rival(rivals.DECODE[name], problem, replays=9)
            found[name] = str(outcome)
            notes += [f"{batch}, {name}, {note}" for note in outcome.notes if not outcome.unfit]
        table.add(found)
        if least := LEAST_SHARES.get(str(batch)):
            notes.append(f"{batch}: {found['copy']:.1%} of copy; at least {least:.0%} are wanted")
        del inputs, problem
    print(*notes, sep="\n")
    table.write(options.json, rates=vars(rates), notes=notes)


if __name__ == "__main__":
    main()
