"""Random steps for attention in parts that end at fixed positions, and the same rows in other surroundings."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from support_attention_cases import NAN, Tensors, Variant, random_tensors, reference

from hf_batchllm.kernels.lists.fixed_lists import FIXED_TILES, build_fixed
from hf_batchllm.kernels.lists.ranges import Readers, Units
from hf_batchllm.kernels.triton.pages_triton import by_page

GROW = 3  # how much decode rows may grow while lists are kept


@dataclass(frozen=True)
class Run:
    """Rows at consecutive positions of one sequence, which end with its last."""

    pages: list[int]  # of the whole sequence
    first: int  # position of the first row
    rows: int
    chain: list[
        tuple[int, int]
    ]  # its shared prefixes, outermost first: a name, and the position up to which it is read


@dataclass
class FixedCase:
    variant: Variant
    runs: list[Run]
    pages: int
    seed: int

    @property
    def rows(self) -> int:
        return sum(run.rows for run in self.runs)

    def tensors(self, device: str) -> Tensors:
        page = self.variant.page
        written = np.zeros(self.pages * page, dtype=bool)
        for run in self.runs:
            at = np.arange(run.first + run.rows + (GROW if run.rows == 1 else 0))
            written[np.array(run.pages)[at // page] * page + at % page] = True
        return random_tensors(np.random.default_rng(self.seed), self.variant, self.rows, written, device)

    def reference(self, tensors: Tensors, grown: int = 0) -> torch.Tensor:
        """All rows; ``tensors`` in float64."""
        k, v, rows = tensors.k.flatten(0, 1), tensors.v.flatten(0, 1), []
        for run in self.runs:
            for position in range(run.first, run.first + run.rows):
                length = position + 1 + (grown if run.rows == 1 else 0)
                at = np.arange(max(0, length - (self.variant.window or length)), length)
                slots = torch.from_numpy(np.array(run.pages)[at // self.variant.page] * self.variant.page)
                slots = (slots + torch.from_numpy(at % self.variant.page)).to(k.device)
                q = tensors.q[len(rows) : len(rows) + 1]
                seen = torch.ones(1, len(at), dtype=torch.bool, device=k.device)
                rows.append(reference(q, k[slots], v[slots], seen, self.variant, tensors.sinks))
        return torch.cat(rows)


def fixed_case(seed: int, variant: Variant, *, runs: int, most: int, chunks: int = 12) -> FixedCase:
    """Up to ``runs`` runs of rows under prefixes that nest, of up to ``most`` tokens each."""
    rng = np.random.default_rng(seed)
    page, numbers = variant.page, iter(rng.permutation(100_000).tolist())
    taken: dict[int, int] = {}
    made: list[Run] = []
    count = int(rng.integers(1, runs + 1))

    def take(tokens: int) -> list[int]:
        found = []
        for _ in range(-(-tokens // page)):
            found.append(taken.setdefault(next(numbers), len(taken)))
        return found

    def grow(left: int, pages: list[int], chain: list[tuple[int, int]]) -> None:
        while left:
            some = int(rng.integers(1, left + 1))
            left -= some
            if len(chain) < 3 and rng.random() < (0.8, 0.5, 0.3)[len(chain)]:
                more = take(page * int(rng.integers(1, most // page + 2)))
                below = pages + more
                grow(some, below, [*chain, (below[-1], page * len(below))])
                continue
            for _ in range(some):
                rows = int(rng.integers(2, chunks + 1)) if chunks > 1 and rng.random() < 0.3 else 1
                first = page * len(pages) + int(rng.integers(0, most))
                own = take(first + rows + GROW - page * len(pages))
                made.append(Run(pages + own, first, rows, chain))

    grow(count, [], [])
    return FixedCase(variant, made, len(taken), seed)


def units_and_readers(case: FixedCase, shared: bool, grown: int = 0) -> tuple[Units, Readers, np.ndarray]:
    """``shared``: prefixes are units of their own; else each run has all of its sequence in one unit."""
    page = case.variant.page
    base: list[int] = []
    start: list[int] = []
    pages: list[list[int]] = []
    known: dict[int, int] = {}

    def unit(under: int, begin: int, of: list[int]) -> int:
        base.append(under)
        start.append(begin)
        pages.append(of)
        return len(base) - 1

    readers = []
    row = 0
    for run in case.runs:
        under, begin = -1, 0
        for name, upto in run.chain if shared else []:
            if name not in known:
                known[name] = unit(under, begin, run.pages[begin // page : upto // page])
            under, begin = known[name], upto
        own = unit(under, begin, run.pages[begin // page :])
        readers.append((own, row, run.rows, run.first + run.rows + (grown if run.rows == 1 else 0)))
        row += run.rows
    page_begin = np.cumsum([0, *map(len, pages)])
    units = Units(np.array(base), np.array(start), page_begin, np.concatenate([np.array(each) for each in pages]))
    lengths = [position + 1 for run in case.runs for position in range(run.first, run.first + run.rows)]
    return units, Readers(*(np.array(column) for column in zip(*readers, strict=True))), np.array(lengths)


def attended(
    kernels: ModuleType,
    case: FixedCase,
    tensors: Tensors,
    shared: bool = True,
    grown: int = 0,
    after: int | None = None,
    **options: Any,
) -> torch.Tensor:  # [rows, heads, v_dim]
    """``grown``: the lists are made for so much growth, and run after ``after`` of it; None: all of it."""
    variant, device = case.variant, tensors.q.device
    units, readers, lengths = units_and_readers(case, shared, grown)
    given: dict[str, Any] = {"multiprocessors": 3, "gates": (1, 1)} | options
    work = build_fixed(
        units, readers, lengths, kv_heads=variant.kv_heads, group=variant.group, page_size=variant.page,
        window=variant.window, direct=not variant.sinks, **given,
    ).to(device)  # fmt: skip
    single = np.repeat([run.rows == 1 for run in case.runs], [run.rows for run in case.runs])
    now = torch.from_numpy((lengths + (grown if after is None else after) * single).astype(np.int32)).to(device)
    out = torch.full((case.rows, variant.heads, variant.v_dim), NAN, dtype=variant.dtype, device=device)
    exact = torch.promote_types(variant.dtype, torch.float32)
    part_out = torch.full((work.parts, variant.heads, variant.v_dim), NAN, dtype=exact, device=device)
    part_sums = torch.full((work.parts, variant.heads, 2), NAN, dtype=exact, device=device)
    boxes = tuple(map(by_page, (tensors.k, tensors.v)))
    for tile in reversed(FIXED_TILES):
        if tile in work.items:
            kernels.attend_fixed(
                tile, tensors.q, tensors.k, tensors.v, boxes, out, part_out, part_sums, work, now, variant.scale,
                window=variant.window, softcap=variant.softcap,
            )  # fmt: skip
    if work.merges:
        kernels.merge_fixed(out, part_out, part_sums, work, sinks=tensors.sinks)
    return out


def some_of(case: FixedCase, tensors: Tensors, which: list[int]) -> tuple[FixedCase, Tensors, torch.Tensor]:
    """These runs alone, in this order; and their rows in the case."""
    first = np.cumsum([0, *(run.rows for run in case.runs)])
    at = torch.from_numpy(np.concatenate([np.arange(first[each], first[each + 1]) for each in which]))
    runs = [case.runs[each] for each in which]
    return FixedCase(case.variant, runs, case.pages, case.seed), _with_rows(tensors, at), at


def row_by_row(case: FixedCase, tensors: Tensors) -> FixedCase:
    """As if each row of a chunk were a decode row, some time later."""
    runs = [Run(run.pages, run.first + nth, 1, run.chain) for run in case.runs for nth in range(run.rows)]
    return FixedCase(case.variant, runs, case.pages, case.seed)


def _with_rows(tensors: Tensors, at: torch.Tensor) -> Tensors:
    return Tensors(tensors.q[at.to(tensors.q.device)], tensors.k, tensors.v, tensors.sinks)
