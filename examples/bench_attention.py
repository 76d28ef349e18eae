"""How fast decode attention over many shared prefixes is on this GPU, beside the bandwidth of a plain copy.

    python examples/bench_attention.py                        # the four default batches
    python examples/bench_attention.py 16x16:2000+250         # groups x rows : shared + own tokens
    python examples/bench_attention.py --json figures.json

A batch is one decode step of one layer: the segment and own launches on parallel branches, then the merge, captured in
a CUDA graph. Each graph goes over several caches in turn, so that nothing is left in L2 from the last time, and the
time is the median of its replays. Pages lie scattered over the caches. Every batch is checked before it is timed.
"unique" counts the K and V bytes of each token once, however many rows read it; "share" sets them against a
device-to-device copy (bytes read + bytes written).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a source checkout needs no installation

from hf_batchllm.kernels import cascade_triton as ct
from hf_batchllm.kernels import work_lists as wl

PAGE = 64
DEFAULT = ["16x16:2000+250", "64x4:2000+250", "1x64:32000+128", "256x1:0+1024"]
TOLERANCE = 8e-3  # bfloat16 weights and output against float32


@dataclass(frozen=True)
class Batch:
    groups: int
    rows: int  # of each group
    shared: int  # tokens
    own: int
    ragged: bool = False  # each prefix and each row has a length of its own, between 0.2 and 1.8 times these

    @classmethod
    def parse(cls, text: str) -> Batch:
        found = re.fullmatch(r"(\d+)x(\d+):(\d+)\+(\d+)(~?)", text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not GROUPSxROWS:SHARED+OWN, or that with a ~ after it")
        groups, rows, shared, own = map(int, found.groups()[:4])
        return cls(groups, rows, shared, own, ragged=bool(found[5]))

    def __str__(self) -> str:
        return f"{self.groups}x{self.rows}:{self.shared}+{self.own}{'~' * self.ragged}"

    @property
    def total_rows(self) -> int:
        return self.groups * self.rows

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each shared prefix [groups] and those of each row's own [rows]."""
        spread = np.random.default_rng(1).uniform(0.2, 1.8, self.groups + self.total_rows)
        if not self.ragged:
            spread[:] = 1
        return (
            (spread[: self.groups] * self.shared).astype(np.int64),
            np.maximum(1, spread[self.groups :] * self.own).astype(np.int64),
        )

    @cached_property
    def lengths(self) -> np.ndarray:  # [rows]
        shared, own = self.sizes
        return np.repeat(shared, self.rows) + own

    @property
    def unique_tokens(self) -> int:
        return sum(int(size.sum()) for size in self.sizes)

    @property
    def pages(self) -> int:
        return sum(int((-(-size // PAGE)).sum()) for size in self.sizes)

    def ranges(self, sharing: bool) -> wl.Ranges:
        """The shared prefixes, then what each row owns; without sharing a row reads everything alone."""
        shared, own = self.sizes
        # One piece for each prefix and each row; pages lie scattered.
        size = np.concatenate([shared, own])
        start = np.concatenate([np.zeros_like(shared), np.repeat(shared, self.rows)])
        pages = -(-size // PAGE)
        begin = np.cumsum(pages) - pages
        numbers = np.random.default_rng(0).permutation(self.pages)
        group, row = np.arange(self.groups), np.arange(self.total_rows)
        if sharing:
            pieces = np.arange(len(size))[size > 0]  # the piece that each range reads
            row_begin = np.concatenate([group * self.rows, row])[pieces]
            row_end = np.concatenate([(group + 1) * self.rows, row + 1])[pieces]
            level = (pieces >= self.groups).astype(np.int64)
            in_range = np.ones(len(pieces), dtype=np.int64)
        else:
            pieces = np.stack([np.repeat(group, self.rows), self.groups + row], axis=1).ravel()
            row_begin, row_end, level = row, row + 1, np.zeros_like(row)
            in_range = np.full(self.total_rows, 2)
        piece = np.repeat(pieces, pages[pieces])  # of each page read
        nth = np.arange(len(piece)) - np.repeat(np.cumsum(pages[pieces]) - pages[pieces], pages[pieces])
        # A row's own last page may hold as much as a page can: the rows' lengths say how far it is filled.
        tokens = np.where(piece < self.groups, np.minimum(PAGE, size[piece] - nth * PAGE), PAGE)
        page_begin = np.concatenate([[0], np.cumsum(pages[pieces])[np.cumsum(in_range) - 1]])
        return wl.Ranges(
            row_begin, row_end, level, page_begin, numbers[begin[piece] + nth], tokens, start[piece] + nth * PAGE
        )


@dataclass
class Inputs:
    """Several caches with the same page table."""

    batch: Batch
    heads: int
    q: torch.Tensor  # [rows, heads, dim]
    caches: list[tuple[torch.Tensor, torch.Tensor]]  # each [pages, PAGE, kv_heads, dim]
    lengths: torch.Tensor  # [rows]
    want: torch.Tensor  # [rows, heads, dim] float32  of the first cache

    @classmethod
    def make(cls, batch: Batch, heads: int, kv_heads: int, dim: int, caches: int, heads_first: bool = False) -> Inputs:
        def cache() -> torch.Tensor:
            shape = (batch.pages, kv_heads, PAGE, dim) if heads_first else (batch.pages, PAGE, kv_heads, dim)
            made = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
            return made.transpose(1, 2) if heads_first else made

        q = torch.randn(batch.total_rows, heads, dim, dtype=torch.bfloat16, device="cuda")
        pairs = [(cache(), cache()) for _ in range(caches)]
        lengths = torch.from_numpy(batch.lengths.astype(np.int32)).cuda()
        return cls(batch, heads, q, pairs, lengths, cls._reference(batch, q, *pairs[0]))

    @staticmethod
    def _reference(batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        alone = batch.ranges(sharing=False)
        token = np.arange(PAGE)[None]
        out = []
        for row in range(batch.total_rows):
            mine = slice(alone.page_begin[row], alone.page_begin[row + 1])
            first = alone.first[mine, None]
            seen = (token < alone.tokens[mine, None]) & (first + token < batch.lengths[row])
            seen = torch.from_numpy(seen).cuda()
            page = torch.from_numpy(alone.page[mine]).cuda()
            keys, values = k[page][seen].float(), v[page][seen].float()  # [keys, kv_heads, dim]
            query = q[row].float().view(keys.shape[1], -1, keys.shape[2])
            weights = torch.einsum("hgd,khd->hgk", query * keys.shape[2] ** -0.5, keys).softmax(-1)
            out.append(torch.einsum("hgk,khd->hgd", weights, values).flatten(0, 1))
        return torch.stack(out)


def measure(
    inputs: Inputs,
    *,
    sharing: bool = True,
    most_pages: int | None = None,
    parallel: bool = True,
    only: tuple[str, ...] = (),
    capacity: int = 1,
    replays: int = 25,
) -> dict[str, float]:
    """Milliseconds for one step, and its error. ``only`` leaves out the other launches (and the check)."""
    batch = inputs.batch
    kv_heads, dim = inputs.caches[0][0].shape[2:]
    work = wl.build_work(
        batch.ranges(sharing),
        batch.lengths,
        kv_heads=kv_heads,
        group=inputs.heads // kv_heads,
        page_size=PAGE,
        multiprocessors=torch.cuda.get_device_properties(inputs.q.device).multi_processor_count,
        most_pages=most_pages,
        capacity=capacity,
    ).to("cuda")
    out = torch.empty_like(inputs.q)
    part_out = torch.empty(work.parts, inputs.heads, dim, device="cuda")
    part_lse = torch.empty(work.parts, inputs.heads, device="cuda")
    tiles = sorted(work.items, reverse=True)
    # Asked for one after the other: torch hands out the same few streams in turn, and two branches that happen to get
    # the same one run one after the other.
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    assert main != side

    def step(k: torch.Tensor, v: torch.Tensor) -> None:
        # The long items first, and on the capturing stream: the other way round the short ones fill the card and the
        # long ones end alone.
        branches = [main, side if parallel else main]
        side.wait_stream(main)
        for tile, stream in zip(tiles, branches, strict=False):
            if not only or str(tile) in only:
                with torch.cuda.stream(stream):
                    ct.attend_items(tile, inputs.q, k, v, out, part_out, part_lse, work, inputs.lengths, dim**-0.5)
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


def graph_ms(function: Callable[[], None], replays: int, stream: torch.cuda.Stream | None = None) -> float:
    """The median time of a replay of a graph of ``function``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([begin.elapsed_time(end) for begin, end in events]))


def warm_branches() -> None:
    """Replay a tiny graph of two branches.

    The first such graph of a process may run its branches one after the other, in every replay until another graph
    has been launched (seen with CUDA 13.0, where much memory had been allocated before).
    """
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    one, other = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=main):
        side.wait_stream(main)
        one.add_(1)
        with torch.cuda.stream(side):
            other.add_(1)
        main.wait_stream(side)
    graph.replay()
    torch.cuda.synchronize()


def copy_bandwidth() -> float:
    """Bytes read and written each second by a large copy."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(15):  # not in a graph: there a copy goes another, slower way
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * source.nbytes / float(np.median(times)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", nargs="*", type=Batch.parse, default=[Batch.parse(text) for text in DEFAULT])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--caches", type=int, default=3, help="how many a graph goes over")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_bandwidth()
    warm_branches()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {copy / 1e12:.2f} TB/s")
    print(f"{'batch':>18} {'ms':>8} {'unique GB/s':>12} {'share':>6} {'error':>8} {'sharing off, ms':>16}")
    figures = []
    for batch in options.batches:
        inputs = Inputs.make(batch, options.heads, options.kv_heads, options.dim, options.caches)
        found = measure(inputs)
        off = measure(inputs, sharing=False) if batch.rows > 1 else found
        unique = batch.unique_tokens * 2 * options.kv_heads * options.dim * 2 / found["ms"] * 1e3
        print(
            f"{batch!s:>18} {found['ms']:8.4f} {unique / 1e9:12.0f} {unique / copy:6.1%} {found['error']:8.1e}"
            f" {off['ms']:16.4f}",
            flush=True,
        )
        figures.append({"batch": str(batch), **found, "unique": unique, "share": unique / copy, "off_ms": off["ms"]})
        del inputs
    if options.json:
        options.json.write_text(json.dumps({"copy": copy, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
