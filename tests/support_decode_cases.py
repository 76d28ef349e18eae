"""Random decode steps for the attention kernels over work lists and their references, and what must come of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from support_attention_cases import (
    GUARD,
    NAN,
    Entries,
    PageList,
    Tensors,
    Variant,
    assert_near,
    columns,
    random_tensors,
    reference,
    tokens_of,
)

from hf_batchllm.kernels.lists import work_lists as wl
from hf_batchllm.kernels.reference import decode_torch

GROW = 5  # how much decode rows grow while a case's lists are kept
LSE_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-3}  # absolute


@dataclass
class DecodeCase:
    variant: Variant
    ranges: wl.Ranges
    lengths: np.ndarray  # [rows]  as the lists are made; padding rows come last, and have 0
    reads: list[np.ndarray]  # of each row: all entries that it reads
    ended: np.ndarray  # [any]  rows that end while the lists are kept
    pages: int
    seed: int
    split: int | None
    kinds: Counter[str]  # of what there is, how many

    def work(self, **options: Any) -> wl.WorkLists:
        variant = self.variant
        given = {"most_pages": self.split, "window": variant.window, "direct": not variant.sinks, "ahead": GROW}
        return wl.build_work(
            self.ranges,
            self.lengths,
            kv_heads=variant.kv_heads,
            group=variant.group,
            page_size=variant.page,
            multiprocessors=3,
            **(given | options),
        )

    def stages(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Lengths for which the same lists hold, and the rows which then go on."""
        going = self.lengths > 0
        yield self.lengths, going
        grown = self.lengths + GROW * going
        yield grown, going
        grown, going = grown.copy(), going.copy()
        grown[self.ended], going[self.ended] = 0, False
        yield grown, going

    def tensors(self, device: str) -> Tensors:
        written = np.zeros(self.pages * self.variant.page, dtype=bool)
        for row, entries in enumerate(self.reads):
            if self.variant.window is not None:  # pages that it sees nothing of any more
                entries = entries[entries[:, 2] + entries[:, 1] > self.lengths[row] - self.variant.window]
            slots, positions = tokens_of(entries, self.variant.page)
            written[slots[positions < self.lengths[row] + GROW]] = True
        rng = np.random.default_rng(self.seed)
        tensors = random_tensors(rng, self.variant, len(self.lengths), written, device)
        tensors.q[torch.from_numpy(self.lengths == 0).to(device)] = NAN
        return tensors

    def never_written(self) -> np.ndarray:
        """Pages that only rows read which end: they may have ended before they came to write there."""
        ranges = self.ranges
        single = ranges.row_end - ranges.row_begin == 1
        theirs = np.repeat(single & np.isin(ranges.row_begin, self.ended), np.diff(ranges.page_begin))
        return np.setdiff1d(ranges.page[theirs], ranges.page[~theirs])

    def reference(self, tensors: Tensors, lengths: np.ndarray) -> torch.Tensor:
        """All rows; ``tensors`` in float64."""
        k, v = tensors.k.flatten(0, 1), tensors.v.flatten(0, 1)
        rows = []
        for row, entries in enumerate(self.reads):
            slots, positions = tokens_of(entries, self.variant.page)
            seen = (positions < lengths[row]) & (positions >= lengths[row] - (self.variant.window or 1 << 40))
            at = torch.from_numpy(slots[seen]).to(k.device)
            q, all_seen = tensors.q[row : row + 1], at.new_ones(1, len(at), dtype=torch.bool)
            rows.append(reference(q, k[at], v[at], all_seen, self.variant, tensors.sinks))
        return torch.cat(rows)


def decode_case(
    seed: int,
    variant: Variant,
    *,
    rows: int,
    most: int,
    suffixes: int = 0,  # rows of the longest
    prefixes: tuple[float, ...] = (0.85, 0.5, 0.3),  # how likely a group has one, and a group in it, and so on
) -> DecodeCase:
    """Up to ``rows`` rows under prefixes of up to ``most`` tokens that nest, and as many tokens of their own.

    A prefix is a range, or is joined to its readers' own pages. With ``suffixes`` some units have several rows, 2 at
    the least: the end of a prompt.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1 if rng.random() < 0.3 else (rows + 1) // 2, rows + 1))
    starts = [0]  # first rows of the units
    while starts[-1] < count:
        of_unit = int(rng.integers(2, suffixes + 1)) if suffixes and rng.random() < 0.4 else 1
        starts.append(min(count, starts[-1] + of_unit))
    pages = PageList(variant.page)
    ranges: list[tuple[int, int, int, Entries, bool]] = []  # row_begin, row_end, level, pages, causal
    lengths, reads = np.zeros(count, dtype=np.int64), [columns([])] * count
    kinds: Counter[str] = Counter()

    def grow(low: int, high: int, depth: int, above: Entries, alone: Entries) -> None:
        """The units [low, high), of which all read ``above``; of that, no range holds ``alone`` yet."""
        start = sum(tokens for _, tokens, _ in above)
        while low < high:
            stop = int(rng.integers(low + 1, high + 1))
            if depth < len(prefixes) and rng.random() < prefixes[depth]:
                prefix = pages.take(start, int(rng.integers(1, most)))
                shared = rng.random() < 0.7
                if shared:
                    ranges.append((starts[low], starts[stop], depth, prefix, False))
                    kinds["one-row group"] += starts[stop] - starts[low] == 1
                    kinds["ragged prefix"] += prefix[-1][1] < variant.page
                if rng.random() < 0.1:
                    ranges.append((starts[low], starts[stop], 3 + depth, [], False))
                    kinds["empty range"] += 1
                grow(low, stop, depth + 1, above + prefix, alone if shared else alone + prefix)
            else:
                for unit in range(low, stop):
                    own(starts[unit], starts[unit + 1], start, above, alone)
            low = stop

    def own(begin: int, end: int, start: int, above: Entries, alone: Entries) -> None:
        earlier = int(rng.integers(0, most))
        mine = pages.take(start, earlier + end - begin + GROW, whole=True)
        ranges.append((begin, end, 9, alone + mine, end - begin > 1))
        lengths[begin:end] = start + earlier + 1 + np.arange(end - begin)
        reads[begin:end] = [columns(above + mine)] * (end - begin)
        kinds["in no segment"] += len(above) == len(alone)
        positions = columns(alone + mine)
        kinds["hole"] += bool((positions[1:, 2] > (positions[:, 1] + positions[:, 2])[:-1]).any())
        kinds["causal"] += end - begin > 1
        kinds["grows onto a page"] += (earlier + end - begin) % variant.page > variant.page - GROW

    grow(0, len(starts) - 1, 0, [], [])
    scattered = rng.permutation(pages.count + 3)
    flat = columns([entry for *_, entries, _ in ranges for entry in entries])
    for entries in {id(each): each for each in (flat, *reads)}.values():
        entries[:, 0] = scattered[entries[:, 0]]
    built = wl.Ranges(
        row_begin=np.array([begin for begin, *_ in ranges]),
        row_end=np.array([end for _, end, *_ in ranges]),
        level=np.array([level for _, _, level, *_ in ranges]),
        page_begin=np.concatenate([[0], np.cumsum([len(entries) for *_, entries, _ in ranges])]),
        page=flat[:, 0],
        tokens=flat[:, 1],
        first=flat[:, 2],
        causal=np.array([causal for *_, causal in ranges]) if suffixes else None,
    )
    if variant.window is not None:
        for begin, end, level, entries, _ in ranges:
            size, last = sum(tokens for _, tokens, _ in entries), columns(entries)[-1:]
            if level < 3:
                kinds["window within a segment"] += variant.window < size
                kinds["window beyond a segment"] += variant.window > size
                kinds["range out of the window"] += int((last[:, 2] + last[:, 1]).sum()) <= (
                    lengths[begin:end].min() - variant.window
                )
    single = np.array([row for row, end in pairwise(starts) if end == row + 1], dtype=np.int64)
    ended = single[rng.random(len(single)) < 0.3]
    padding = int(rng.integers(0, 4)) if rng.random() < 0.4 else 0
    kinds["padding row"] += padding
    kinds["ended"] += len(ended)
    lengths = np.append(lengths, np.zeros(padding, dtype=np.int64))
    reads += [columns([])] * padding
    split = None if rng.random() < 0.4 else int(rng.integers(1, 5))
    return DecodeCase(variant, built, lengths, reads, ended, len(scattered), seed, split, kinds)


class Outputs:
    """Where launches write: all NaN, with rows around that stay so."""

    def __init__(self, guarded: list[torch.Tensor], guard: int) -> None:
        self.guarded, self.guard = guarded, guard
        self.out, self.part_out, self.part_lse = self.inside = [each[guard : len(each) - guard] for each in guarded]

    @classmethod
    def empty(cls, case: DecodeCase, parts: int, dtype: torch.dtype, device: str, guard: int = GUARD) -> Outputs:
        heads, wide = case.variant.heads, torch.promote_types(dtype, torch.float32)
        made = [
            torch.full((count + 2 * guard, heads, *shape), NAN, dtype=kind, device=device)
            for count, shape, kind in (
                (len(case.lengths), [case.variant.v_dim], dtype),
                (parts, [case.variant.v_dim], wide),
                (parts, [], wide),
            )
        ]
        return cls(made, guard)

    def to(self, device: str) -> Outputs:
        return Outputs([each.to(device) for each in self.guarded], self.guard)

    def add(self, other: Outputs) -> None:
        """What another launch has written, to other places."""
        for mine, its in zip(self.inside, other.inside, strict=True):
            assert (mine.isnan() | its.isnan()).all(), "two launches wrote to the same place"
            mine.copy_(torch.where(its.isnan(), mine, its))

    def without(self, rows: torch.Tensor, row_parts: torch.Tensor) -> Outputs:
        """With zeros wherever there is a number of ``rows`` [rows] bool: prefixes may be read for what has ended."""
        left = Outputs([each.clone() for each in self.guarded], self.guard)
        parts = rows.repeat_interleave(row_parts.diff().long())
        for each, of_rows in zip(left.inside, (rows, parts, parts), strict=True):
            each[of_rows] = torch.where(each[of_rows].isnan(), each[of_rows], 0.0)
        return left

    def assert_near(self, reference: Outputs, what: str) -> float:
        """What one launch has written; the worst error."""
        self.assert_guarded()
        dtype = self.out.dtype
        assert (self.part_lse.isneginf() == reference.part_lse.isneginf()).all(), f"{what}: the LSE of nothing"
        mine, its = (torch.where(each.isneginf(), 0.0, each) for each in (self.part_lse, reference.part_lse))
        assert (mine.isnan() == its.isnan()).all(), f"{what}: an LSE was left out, or another one written"
        assert ((mine - its).nan_to_num().abs() <= LSE_TOLERANCE[dtype]).all(), f"{what}: LSE"
        pairs = (self.out, reference.out), (self.part_out, reference.part_out)
        return max(assert_near(mine, its, dtype, what) for mine, its in pairs)

    def assert_guarded(self) -> None:
        for each in self.guarded:
            around = torch.cat([each[: self.guard], each[len(each) - self.guard :]])
            assert around.isnan().all(), "written out of bounds"


def check_decode(
    kernels: ModuleType, case: DecodeCase, device: str, *, references_on: str | None = None, guard: int = GUARD
) -> dict[str, float]:
    """A decode step, launch by launch, at each stage of the rows. The worst error of each kernel against its reference.

    Without a guard the outputs end where their memory ends, so that a sanitizer sees what goes beyond.
    """
    variant, here = case.variant, references_on or device
    tensors = case.tensors(here)
    exact, given = tensors.to(torch.float64), tensors.to(device)
    lists = case.work(capacity=2)
    for tile, items in lists.items.items():  # what is beyond the count would do harm
        items[int(lists.counts[tile]) :] = items[0]
        items[int(lists.counts[tile]) :, 5] = -1
    lists, work = lists.to(here), lists.to(device)
    options = {"window": variant.window, "softcap": variant.softcap}
    errors: Counter[str] = Counter()
    for stage, going in case.stages():
        if (~going)[case.ended].all():
            for each in (given, exact):
                for pages in (each.k, each.v):
                    pages[torch.from_numpy(case.never_written()).to(pages.device)] = NAN
        lengths = torch.from_numpy(stage.astype(np.int32))
        ours = Outputs.empty(case, work.parts, variant.dtype, here, guard)
        for tile in work.items:
            kernel = "own" if tile == wl.TILES[0] else "segment"
            what = f"{kernel}, {variant}"
            got = Outputs.empty(case, work.parts, variant.dtype, device, guard)
            kernels.attend_items(
                tile, given.q, given.k, given.v, *got.inside, work, lengths.to(device), variant.scale, **options
            )
            got = got.to(here)
            want = Outputs.empty(case, work.parts, torch.float64, here)
            decode_torch.attend_items(
                tile, exact.q, exact.k, exact.v, *want.inside, lists, lengths.to(here), variant.scale, **options
            )
            rows = torch.from_numpy(~going).to(here)
            near = got.without(rows, lists.row_parts).assert_near(want.without(rows, lists.row_parts), what)
            errors[kernel] = max(errors[kernel], near)
            ours.add(got)
        _assert_parts_are_written(lists, ours)
        joined = ours.out.double()
        decode_torch.merge_parts(joined, ours.part_out.double(), ours.part_lse.double(), lists, sinks=exact.sinks)
        merged = ours.to(device)
        kernels.merge_parts(*merged.inside, work, sinks=given.sinks)
        ours = merged.to(here)
        ours.assert_guarded()
        errors["merge"] = max(errors["merge"], assert_near(ours.out, joined, variant.dtype, f"merge, {variant}"))
        assert ours.out.isfinite().all(), "what has ended is no less finite than the rest"
        assert (ours.out[torch.from_numpy(case.lengths == 0).to(here)] == 0).all(), "a padding row's output is 0"
        rows = torch.from_numpy(going).to(here)
        assert_near(ours.out[rows], case.reference(exact, stage)[rows], variant.dtype, f"whole step, {variant}")
    return dict(errors)


def _assert_parts_are_written(work: wl.WorkLists, outputs: Outputs) -> None:
    """By now the output of a row with a single part stands, or all parts of a row that is to be merged."""
    counts = work.row_parts.diff()
    merged = counts != 1 if work.direct else torch.ones_like(counts, dtype=torch.bool)
    assert (outputs.out.isnan().flatten(1).all(1) == merged).all() and not outputs.out[~merged].isnan().any()
    assert (outputs.part_lse.isnan().all(1) == ~merged.repeat_interleave(counts)).all(), "a part is missing"
