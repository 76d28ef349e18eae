"""How fast decode attention over many shared prefixes is on this GPU, beside the floor and other libraries.

    python examples/benchmarks/bench_decode_attention.py  # the default batches
    python examples/benchmarks/bench_decode_attention.py 16x16:2000+250  # groups x rows : shared + own tokens
    python examples/benchmarks/bench_decode_attention.py --rivals all  # torch, FlashInfer, ... where installed
    python examples/benchmarks/bench_decode_attention.py --json figures.json

bench_support/attention_batches.py explains how batches are written and how the floor is worked out;
bench_support/attention_rivals.py, what the rivals get. A batch is one decode step of one layer in a CUDA graph: the
segment and own launches on parallel branches, then the merge. Prefixes become segments where the gate of
kernels/ranges.py lets them. Each graph goes over several caches in turn, so that nothing stays in L2, and the time is
the median of its replays. Pages lie scattered over the caches. Every batch is checked before it is timed.

"GB/s" counts the K and V bytes of each token once, however many rows read it; "copy" is the share of a device-to-device
copy's rate (bytes read + bytes written); "floor" is the floor's share of the time. "off" is the time if every row reads
all of its tokens by itself. random:40 should reach 60 % of copy.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench_support import attention_rivals as rivals
from bench_support.attention_batches import NEVER, PAGE, floor_ms, operations, unique_bytes
from bench_support.attention_batches import DecodeBatch as Batch
from bench_support.attention_problem import Problem
from bench_support.gpu_timing import graph_ms, need_gpu, warm_branches
from bench_support.options import add_attention_options, add_json_option, write_json

from hf_batchllm.bench.machine_rates import measure_rates
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
    def make(
        cls,
        batch: Batch,
        heads: int,
        kv_heads: int,
        dim: int,
        caches: int,
        heads_first: bool = False,
        window: int | None = None,
    ) -> Inputs:
        def cache() -> torch.Tensor:
            shape = (batch.pages, kv_heads, PAGE, dim) if heads_first else (batch.pages, PAGE, kv_heads, dim)
            made = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
            return made.transpose(1, 2) if heads_first else made

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
                    ct.attend_items(
                        tile,
                        inputs.q,
                        k,
                        v,
                        out,
                        part_out,
                        part_lse,
                        work,
                        inputs.lengths,
                        dim**-0.5,
                        window=inputs.window,
                    )
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
    return {"ms": graph_ms(steps, replays, main) / len(inputs.caches), "error": error, "parts": work.parts}


def report(inputs: Inputs, copy: float, matmul: float) -> dict[str, Any]:
    batch, (kv_heads, dim) = inputs.batch, inputs.caches[0][0].shape[2:]
    found: dict[str, Any] = measure(inputs)
    ms = found["ms"]
    moved = unique_bytes(batch.unique_tokens, kv_heads, dim)
    computed = operations(batch.pairs, inputs.heads, dim)
    floor = floor_ms(moved, computed, copy, matmul)
    off = measure(inputs, gate=NEVER, gate_merged=NEVER)["ms"] if batch.shares else ms
    return {"batch": str(batch), "rows": batch.total_rows, **found, "unique": moved / ms * 1e3, "off_ms": off} | {
        "share": moved / ms * 1e3 / copy,
        "tflops": computed / ms / 1e9,
        "floor_ms": floor,
        "floor_share": floor / ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", nargs="*", type=Batch.parse, default=[Batch.parse(text) for text in DEFAULT])
    add_attention_options(parser)
    parser.add_argument("--caches", type=int, default=3, help="that a graph goes over (default: %(default)s)")
    parser.add_argument("--rivals", default="none", help=f"a list of {', '.join(rivals.DECODE)}; none; or all")
    add_json_option(parser)
    options = parser.parse_args()
    need_gpu()
    names, missing = rivals.chosen(options.rivals, rivals.DECODE)
    torch.manual_seed(0)
    rates = measure_rates(torch.device("cuda"), torch.bfloat16)
    copy, matmul = rates.copy, rates.operations
    warm_branches()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {copy / 1e12:.2f} TB/s,", end=" ")
    print(f"products {matmul / 1e12:.0f} TFLOP/s; {options.heads} / {options.kv_heads} heads of {options.dim}")
    if missing:
        print(f"not installed: {', '.join(missing)}")
    print(f"{'batch':>16} {'rows':>5} {'ms':>7} {'GB/s':>5} {'copy':>6} {'TFLOP/s':>7} {'floor':>6}", end="")
    print(f" {'off, ms':>8} {'ratio':>5}" + "".join(f" {name:>10}" for name in names))
    figures, failures = [], []
    for batch in options.batches:
        inputs = Inputs.make(batch, options.heads, options.kv_heads, options.dim, options.caches)
        found = report(inputs, copy, matmul)
        print(f"{batch!s:>16} {batch.total_rows:5} {found['ms']:7.4f} {found['unique'] / 1e9:5.0f}", end="")
        print(
            f" {found['share']:6.1%} {found['tflops']:7.0f} {found['floor_share']:6.1%} {found['off_ms']:8.4f}", end=""
        )
        print(f" {found['off_ms'] / found['ms']:5.2f}", end="", flush=True)
        problem, found["rivals"] = inputs.problem, {}
        for name in names:
            outcome = rivals.time_rival(rivals.DECODE[name], problem, replays=9)
            found["rivals"][name] = outcome.ms
            failures += [f"{batch}, {name}, {note}" for note in outcome.notes if not outcome.unfit]
            print(f" {outcome!s:>10}", end="", flush=True)
        print()
        figures.append(found)
        del inputs, problem
    for failure in failures:
        print(failure)
    for found in figures:
        if least := LEAST_SHARES.get(found["batch"]):
            print(f"{found['batch']}: {found['share']:.1%} of copy; at least {least:.0%} are wanted")
    written = {"copy": copy, "matmul": matmul, "missing": missing, "figures": figures, "failures": failures}
    write_json(options.json, written)


if __name__ == "__main__":
    main()
