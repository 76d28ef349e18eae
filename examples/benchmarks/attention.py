"""Attention problems: how batches are written, which rows read which tokens, their floor, and forms for others.

Decode, one token for each row: ``16x16:2000+250`` is groups x rows : tokens that a group shares + own tokens of each
row. A ``~`` at the end draws each of these lengths between 0.2 and 1.8 times as much. ``2000/32x8:100+250`` puts 2,000
tokens in front that all rows share. ``random:40`` is 40 groups of 1 to 64 rows, with 100 to 8,000 shared and 20 to 500
own tokens; ``random:40@7`` draws them with another seed.

Prefill, causal: ``4x2048`` is chunks x rows; ``4x2000+16x200`` adds members x rows that read each chunk as their prefix
in the same step; ``1x2048@6144`` puts tokens of earlier steps before each chunk.

**The floor** is the least time that a kernel can take on this GPU. It is the larger of two times: the bytes of K and V,
each token once however many rows read it, at the rate of a copy; and the operations at the sustained rate of large
matrix products. Operations are 4 x heads x dim for each (row, key) pair that counts: a product and a sum for the score,
and again for the value. Both rates are measured in the same run. Queries, outputs and partial results do not count.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import common
import numpy as np
import torch

from hf_batchllm.bench.floor import Rates, measure_rates
from hf_batchllm.kernels.ranges import GATE, GATE_MERGED, Readers, Units, make_chunks, make_ranges
from hf_batchllm.kernels.work_lists import Chunks, Ranges

PAGE = 64
EVERY, NEVER = 1e-9, np.inf  # gates that make every shared prefix a segment, and none


def operations(pairs: int, heads: int, dim: int) -> int:
    return 4 * heads * dim * pairs


def unique_bytes(tokens: int, kv_heads: int, dim: int) -> int:
    """Bytes of K and V in bfloat16."""
    return 2 * 2 * kv_heads * dim * tokens


def floor_ms(moved: int, computed: int, copy: float, matmul: float) -> float:
    return 1e3 * max(moved / copy, computed / matmul)


def slots_of(chunks: Chunks, ends: np.ndarray) -> list[np.ndarray]:
    """The slots of the cache that each reader's last row sees, in order of position."""
    at = np.arange(PAGE)
    found = []
    for i, end in enumerate(ends):
        mine = slice(chunks.page_begin[i], chunks.page_begin[i + 1])
        seen = (at < chunks.tokens[mine, None]) & (chunks.first[mine, None] + at < end)
        found.append((chunks.page[mine, None] * PAGE + at)[seen])
    return found


def _scattered(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pages scattered over the cache for units of ``tokens`` tokens: where each unit's pages begin, and the pages."""
    pages = -(-tokens // PAGE)
    begin = np.concatenate([[0], np.cumsum(pages)])
    return begin, np.random.default_rng(0).permutation(int(begin[-1]))


@dataclass(frozen=True)
class DecodeBatch:
    name: str
    degrees: np.ndarray  # [groups]  rows of each
    shared: np.ndarray  # [groups]  tokens
    own: np.ndarray  # [rows]  tokens
    outer: int = 0  # tokens that all rows share

    @classmethod
    def parse(cls, text: str) -> DecodeBatch:
        if drawn := re.fullmatch(r"random:(\d+)(?:@(\d+))?", text):
            rng = np.random.default_rng(int(drawn[2] or 0))
            groups = int(drawn[1])
            degrees, shared = rng.integers(1, 65, groups), rng.integers(100, 8001, groups)
            return cls(text, degrees, shared, rng.integers(20, 501, int(degrees.sum())))
        found = re.fullmatch(r"(?:(\d+)/)?(\d+)x(\d+):(\d+)\+(\d+)(~?)", text)
        if not found:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not GROUPSxROWS:SHARED+OWN, with OUTER/ before or ~ after it, or random:GROUPS[@SEED]"
            )
        outer, groups, rows, shared, own = (int(number or 0) for number in found.groups()[:5])
        spread = np.random.default_rng(1).uniform(0.2, 1.8, groups + groups * rows)
        if not found[6]:
            spread[:] = 1
        return cls(
            text,
            np.full(groups, rows),
            (spread[:groups] * shared).astype(np.int64),
            np.maximum(1, spread[groups:] * own).astype(np.int64),
            outer,
        )

    def __str__(self) -> str:
        return self.name

    @property
    def total_rows(self) -> int:
        return len(self.own)

    @property
    def shares(self) -> bool:
        return bool(self.outer or ((self.degrees > 1) & (self.shared > 0)).any())

    @cached_property
    def lengths(self) -> np.ndarray:  # [rows]
        return self.outer + np.repeat(self.shared, self.degrees) + self.own

    @property
    def unique_tokens(self) -> int:
        return self.outer + int(self.shared.sum() + self.own.sum())

    @property
    def pairs(self) -> int:
        """(row, key) pairs."""
        return int(self.lengths.sum())

    @property
    def pages(self) -> int:
        return len(self.units.page)

    @cached_property
    def units(self) -> Units:
        """One unit for all rows, one for each group, and one for each row."""
        groups = len(self.degrees)
        page_begin, page = _scattered(np.concatenate([[self.outer], self.shared, self.own]))
        on_group = 1 + np.repeat(np.arange(groups), self.degrees)
        return Units(
            base=np.concatenate([[-1], np.full(groups, 0 if self.outer else -1), on_group]),
            start=np.concatenate([[0], np.full(groups, self.outer), self.lengths - self.own]),
            page_begin=page_begin,
            page=page,
        )

    @cached_property
    def readers(self) -> Readers:
        row = np.arange(self.total_rows)
        return Readers(1 + len(self.degrees) + row, row, np.ones_like(row), self.lengths)

    @cached_property
    def slots(self) -> list[np.ndarray]:
        return slots_of(make_chunks(self.units, self.readers, page_size=PAGE), self.lengths)

    def ranges(self, gate: float = GATE, gate_merged: float = GATE_MERGED, window: int | None = None) -> Ranges:
        return make_ranges(self.units, self.readers, page_size=PAGE, window=window, gate=gate, gate_merged=gate_merged)


@dataclass(frozen=True)
class PrefillBatch:
    chunks: int
    rows: int
    members: int = 0  # readers of each chunk, as their prefix
    member_rows: int = 0
    earlier: int = 0  # tokens before each chunk

    @classmethod
    def parse(cls, text: str) -> PrefillBatch:
        found = re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+)x(\d+))?(?:@(\d+))?", text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not CHUNKSxROWS, with +MEMBERSxROWS or @EARLIER after it")
        return cls(*(int(number or 0) for number in found.groups()))

    def __str__(self) -> str:
        members = f"+{self.members}x{self.member_rows}" if self.members else ""
        return f"{self.chunks}x{self.rows}{members}" + (f"@{self.earlier}" if self.earlier else "")

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(rows, position of the first row) for each reader, chunks first."""
        upper = self.earlier + self.rows
        return [(self.rows, self.earlier)] * self.chunks + [(self.member_rows, upper)] * (self.chunks * self.members)

    @property
    def total_rows(self) -> int:
        return sum(rows for rows, _ in self.spans)

    @property
    def pairs(self) -> int:
        """(row, key) pairs that causality needs."""
        return sum(rows * first + rows * (rows + 1) // 2 for rows, first in self.spans)

    @property
    def unique_tokens(self) -> int:
        return self.chunks * self.earlier + self.total_rows

    @property
    def pages(self) -> int:
        return len(self.units.page)

    @cached_property
    def units(self) -> Units:
        upper = self.earlier + self.rows
        members = np.repeat(np.arange(self.chunks), self.members)  # the chunk of each member
        tokens = np.concatenate([np.full(self.chunks, upper), np.full(len(members), self.member_rows)])
        start = np.concatenate([np.zeros(self.chunks, dtype=np.int64), np.full(len(members), upper)])
        page_begin, page = _scattered(tokens)
        return Units(np.concatenate([np.full(self.chunks, -1), members]), start, page_begin, page)

    @cached_property
    def readers(self) -> Readers:
        rows, first = np.array(self.spans, dtype=np.int64).T
        return Readers(np.arange(len(rows)), np.cumsum(rows) - rows, rows, first + rows)

    @cached_property
    def layout(self) -> Chunks:
        return make_chunks(self.units, self.readers, page_size=PAGE)

    @cached_property
    def slots(self) -> list[np.ndarray]:
        return slots_of(self.layout, self.readers.end)


@dataclass(frozen=True)
class Paging:
    """The same K and V in the pages of other libraries, where only the last page of a reader may be partly filled.

    If a prefix ends inside a page, each reader has a page of its own there.
    """

    source: np.ndarray  # [pages, size]  the slot that each place is a copy of
    page: np.ndarray  # a reader's pages are [begin[i], begin[i + 1])
    begin: np.ndarray  # [readers + 1]
    last: np.ndarray  # [readers]  tokens in the last page


def repage(slots: Sequence[np.ndarray], size: int) -> Paging:
    lengths = np.array([len(each) for each in slots])
    pages = -(-lengths // size)
    filled = np.concatenate([np.append(each, np.repeat(each[-1:], -len(each) % size)) for each in slots])
    places = filled.reshape(-1, size)
    # Readers of the same first and last slot read the same page.
    key = places[:, 0] * (int(filled.max()) + 1) + places[:, -1]
    _, example, page = np.unique(key, return_index=True, return_inverse=True)
    number = np.random.default_rng(2).permutation(len(example))
    source = np.empty((len(example), size), dtype=np.int64)
    source[number] = places[example]
    return Paging(source, number[page], np.concatenate([[0], np.cumsum(pages)]), lengths - (pages - 1) * size)


GATHERED_BYTES = 1 << 30  # of K and V that a graph goes over: more than the L2 cache holds
Step = Callable[[], torch.Tensor]  # [rows, heads, dim]


class Unfit(Exception):
    """Raised for a problem that a rival is not made for."""


@dataclass
class Problem:
    q: torch.Tensor  # [rows, heads, dim]
    caches: list[tuple[torch.Tensor, torch.Tensor]]  # each [pages, PAGE, kv_heads, dim]
    want: torch.Tensor  # [rows, heads, dim]  of the first cache
    slots: list[np.ndarray]  # for each reader, the slots that its last row sees
    rows: np.ndarray  # [readers]  query rows, at the last of these positions
    prefixes: np.ndarray | None = None  # [groups]  tokens that all readers of a group see
    degrees: np.ndarray | None = None  # [groups]  readers

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(each) for each in self.slots])

    @property
    def kv_heads(self) -> int:
        return self.caches[0][0].shape[2]

    @property
    def dim(self) -> int:
        return self.q.shape[2]

    def int32(self, values: Iterable[int] | np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(self.q.device)

    def gathered(self, index: np.ndarray, heads_first: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V at these slots [..., kv_heads, dim], from enough caches to exceed the L2 cache.

        With ``heads_first`` an index [readers, keys] gives [readers, kv_heads, keys, dim].
        """
        size = 2 * index.size * self.kv_heads * self.dim * self.q.element_size()
        places = torch.from_numpy(index).to(self.q.device)

        def one(cache: torch.Tensor) -> torch.Tensor:
            flat = cache.reshape(-1, self.kv_heads, self.dim)
            if not heads_first:
                return flat[places]
            made = flat.new_empty(len(index), self.kv_heads, index.shape[1], self.dim)
            for row, place in enumerate(places):
                made[row] = flat[place].transpose(0, 1)
            return made

        count = max(1, min(len(self.caches), -(-GATHERED_BYTES // size)))
        return [(one(k), one(v)) for k, v in self.caches[:count]]


Make = Callable[[Problem], list[Step]]  # one step for each cache


def plain_prompts(problem: Problem) -> np.ndarray:
    """Slots [prompts, tokens]; raises Unfit unless the batch is nothing but prompts of one length."""
    if (problem.rows != problem.rows[0]).any() or (problem.lengths != problem.rows).any():
        raise Unfit("for prompts of one length, without prefixes")
    return np.stack(problem.slots)


def add_attention(parser: argparse.ArgumentParser, default: str, rivals: Iterable[str]) -> None:
    """Options of the scripts that time attention; ``default``: of --rivals."""
    common.add_numbers(parser, heads=(32, "query heads"), kv_heads=(8, "KV heads"), dim=(128, "of a head"))
    common.add_numbers(parser, caches=(3, "that a graph goes over"), replays=(15, "of each graph"))
    parser.add_argument("--rivals", default=default, help=f"a list of {', '.join(rivals)}; none; or all")
    common.add_json(parser)


def begin(options: argparse.Namespace) -> Rates:
    """Measures the machine, and prints what it is."""
    common.need_gpu()
    torch.manual_seed(0)
    rates = measure_rates(torch.device("cuda"), torch.bfloat16)
    common.warm_branches()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {rates};", end=" ")
    print(f"{options.heads} / {options.kv_heads} heads of {options.dim}")
    return rates
