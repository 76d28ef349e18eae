"""The Triton kernels for decode over shared prefixes against a plain reference in float64.

Without a GPU the kernels run under Triton's interpreter. It must be chosen before anything imports Triton, and then
holds for the whole process; so unless it was, one test here runs the others in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from hf_batchllm.kernels import cascade_triton as ct
from hf_batchllm.kernels import work_lists as wl

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
NAN = float("nan")
PAGES = 4000
Entries = list[tuple[int, int, int]]  # page, tokens, position of the first
GROW = 5  # how much the rows grow while a case's lists are kept


@dataclass
class Shape:
    rows: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    page: int


@dataclass
class Case:
    shape: Shape
    ranges: wl.Ranges
    lengths: np.ndarray  # [rows]
    keys: list[tuple[np.ndarray, np.ndarray]]  # of each row: the slots of its keys and their positions
    q: torch.Tensor
    k: torch.Tensor  # [pages, page, kv_heads, qk_dim]
    v: torch.Tensor


def make_case(seed: int, shape: Shape, dtype: torch.dtype, most: int = 70) -> Case:
    """Rows under no, one or two shared prefixes with ragged ends, some prefixes joined to their readers' own pages.

    Whatever no row ever reads is NaN, in K and in V.
    """
    rng = np.random.default_rng(seed)
    free = iter(rng.permutation(PAGES))
    ranges: list[tuple[int, int, int, Entries]] = []  # row_begin, row_end, level, pages
    reads: list[Entries] = [[] for _ in range(shape.rows)]  # all that a row reads
    alone: list[Entries] = [[] for _ in range(shape.rows)]  # of that, what no item reads for several rows

    def pages_for(start: int, size: int) -> Entries:
        return [
            (int(next(free)), min(shape.page, size - offset), start + offset) for offset in range(0, size, shape.page)
        ]

    def tokens_of(entries: Entries) -> int:
        return sum(tokens for _, tokens, _ in entries)

    begin = 0
    while begin < shape.rows:
        end = min(shape.rows, begin + int(rng.integers(1, shape.rows + 1)))
        prefixes = [(begin, end)] if rng.random() < 0.8 else []
        if prefixes and end - begin > 2 and rng.random() < 0.6:
            prefixes.append((begin, int(rng.integers(begin + 1, end))))
        for level, (low, high) in enumerate(prefixes):
            pages = pages_for(tokens_of(reads[low]), int(rng.integers(1, most)))
            together = high - low > 1 and rng.random() < 0.8
            if together:
                ranges.append((low, high, level, pages))
            for row in range(low, high):
                reads[row] += pages
                alone[row] += [] if together else pages
        begin = end
    lengths = np.zeros(shape.rows, dtype=np.int64)
    for row in range(shape.rows):
        start, size = tokens_of(reads[row]), int(rng.integers(1, most))
        own = [(page, shape.page, first) for page, _, first in pages_for(start, size + GROW)]
        ranges.append((row, row + 1, 2, alone[row] + own))
        reads[row] += own
        lengths[row] = start + size
    pages = np.array([page for *_, pages in ranges for page in pages]).reshape(-1, 3)
    built = wl.Ranges(
        row_begin=np.array([low for low, *_ in ranges]),
        row_end=np.array([high for _, high, *_ in ranges]),
        level=np.array([level for _, _, level, _ in ranges]),
        page_begin=np.concatenate([[0], np.cumsum([len(pages) for *_, pages in ranges])]),
        page=pages[:, 0],
        tokens=pages[:, 1],
        first=pages[:, 2],
    )
    keys = []
    for row in range(shape.rows):
        slots = np.concatenate([page * shape.page + np.arange(tokens) for page, tokens, _ in reads[row]])
        positions = np.concatenate([first + np.arange(tokens) for _, tokens, first in reads[row]])
        keys.append((slots, positions))
    written = torch.zeros(PAGES * shape.page, dtype=torch.bool)
    for row, (slots, positions) in enumerate(keys):
        written[slots[positions < lengths[row] + GROW]] = True
    generator = torch.Generator().manual_seed(seed)

    def cache(dim: int) -> torch.Tensor:
        values = torch.randn(PAGES * shape.page, shape.kv_heads, dim, generator=generator)
        values[~written] = NAN
        return values.to(dtype).view(PAGES, shape.page, shape.kv_heads, dim)

    q = torch.randn(shape.rows, shape.heads, shape.qk_dim, generator=generator).to(dtype)
    return Case(shape, built, lengths, keys, q, cache(shape.qk_dim), cache(shape.v_dim))


def reference(
    case: Case, lengths: np.ndarray, scale: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    shape = case.shape
    k = case.k.flatten(0, 1).double()
    v = case.v.flatten(0, 1).double()
    out = torch.zeros(shape.rows, shape.heads, shape.v_dim, dtype=torch.float64)
    for row, (slots, positions) in enumerate(case.keys):
        seen = positions < lengths[row]
        if window is not None:
            seen &= positions >= lengths[row] - window
        at = torch.from_numpy(slots[seen])
        keys = k[at].repeat_interleave(shape.heads // shape.kv_heads, 1)  # [keys, heads, qk_dim]
        values = v[at].repeat_interleave(shape.heads // shape.kv_heads, 1)
        scores = torch.einsum("hd,khd->hk", case.q[row].double(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], 1)
            values = torch.cat([values, torch.zeros_like(values[:1])])
        out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return out


def run(
    case: Case,
    work: wl.WorkLists,
    lengths: np.ndarray,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if not GPU and not INTERPRETED:
        pytest.skip("is run by test_under_the_interpreter")
    shape = case.shape
    work = work.to(DEVICE)
    out = torch.full((shape.rows, shape.heads, shape.v_dim), NAN, dtype=case.q.dtype, device=DEVICE)
    part_out = torch.full((work.parts, shape.heads, shape.v_dim), NAN, device=DEVICE)
    part_lse = torch.full((work.parts, shape.heads), NAN, device=DEVICE)
    q, k, v = case.q.to(DEVICE), case.k.to(DEVICE), case.v.to(DEVICE)
    on_device = torch.from_numpy(lengths.astype(np.int32)).to(DEVICE)
    for tile in work.items:
        ct.attend_items(tile, q, k, v, out, part_out, part_lse, work, on_device, scale, window=window, softcap=softcap)
    if work.merges:
        ct.merge_parts(out, part_out, part_lse, work, sinks=sinks if sinks is None else sinks.to(DEVICE))
    return out.cpu()


def build(case: Case, **options: Any) -> wl.WorkLists:
    shape = case.shape
    heads = {"kv_heads": shape.kv_heads, "group": shape.heads // shape.kv_heads}
    return wl.build_work(case.ranges, case.lengths, **heads, page_size=shape.page, multiprocessors=2, **options)


def check(case: Case, split: int | None, tolerance: float, window: int | None = None, **options: Any) -> None:
    shape = case.shape
    scale = 1.3 * shape.qk_dim**-0.5
    work = build(case, most_pages=split, window=window, ahead=GROW, capacity=2, direct=options.get("sinks") is None)
    for grown in (0, GROW):
        lengths = case.lengths + grown
        want = reference(case, lengths, scale, window, options.get("softcap"), options.get("sinks"))
        got = run(case, work, lengths, scale, window, **options)
        error = (got.double() - want).norm() / want.norm()
        assert error < tolerance, f"after {grown} steps: {error}"  # NaN is not below anything


@pytest.mark.skipif(GPU or INTERPRETED, reason="the kernels run in this process")
def test_under_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


SMALL = Shape(rows=9, heads=4, kv_heads=2, qk_dim=16, v_dim=16, page=16)


@pytest.mark.parametrize("seed", range(1, 5))
def test_random_trees(seed: int) -> None:
    check(make_case(seed, SMALL, torch.float32), split=1 + seed, tolerance=1e-5)


def test_many_rows_fill_every_tile() -> None:
    """Prefixes of three or more blocks of 64 lines, of two, of one, and of one of 16."""
    case = make_case(62, Shape(rows=100, heads=2, kv_heads=1, qk_dim=16, v_dim=16, page=16), torch.float32, most=30)
    lines = (case.ranges.row_end - case.ranges.row_begin) * 2
    assert max(lines) > 128
    assert any((lines > 64) & (lines <= 128))
    assert any((lines > 16) & (lines <= 64))
    assert any((lines > 2) & (lines <= 16))
    check(case, split=2, tolerance=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "qk_dim", "v_dim"), [(7, 1, 16, 16), (6, 2, 24, 16), (2, 2, 32, 16), (3, 1, 16, 40)]
)
def test_shapes(heads: int, kv_heads: int, qk_dim: int, v_dim: int) -> None:
    """Groups and dims that are no powers of two, and unequal dims."""
    check(make_case(6, Shape(6, heads, kv_heads, qk_dim, v_dim, 16), torch.float32), split=3, tolerance=1e-5)


@pytest.mark.parametrize("window", [1, 20, 50])
def test_window(window: int) -> None:
    check(make_case(6, SMALL, torch.float32), split=3, tolerance=1e-5, window=window)


def test_softcap_and_sinks() -> None:
    case = make_case(7, SMALL, torch.float32)
    check(case, split=2, tolerance=1e-5, softcap=1.5)
    check(case, split=2, tolerance=1e-5, sinks=torch.linspace(-1, 2, SMALL.heads))


def test_a_row_with_nothing_to_read_gets_zeros() -> None:
    """A padding row has no range: no part of it is written, and its output must be finite all the same."""
    case = make_case(8, SMALL, torch.float32)
    case.lengths = np.append(case.lengths, 0)
    case.q = torch.cat([case.q, case.q[:1]])
    case.shape = replace(SMALL, rows=SMALL.rows + 1)
    out = run(case, build(case), case.lengths, 0.25)
    assert (out[-1] == 0).all()
    assert out.isfinite().all()


def test_a_row_that_ended_changes_no_other() -> None:
    """Rows that ended after the lists were made, the first reader of each prefix among them."""
    case = make_case(12, SMALL, torch.float32)
    lengths = case.lengths.copy()
    shared = case.ranges.row_end - case.ranges.row_begin > 1
    ended = case.ranges.row_begin[shared]  # also the first of those that read a prefix
    assert len(ended)
    lengths[ended] = 0
    out = run(case, build(case, most_pages=1), lengths, 0.25)
    assert out.isfinite().all()
    want = reference(case, case.lengths, 0.25, None, None, None)
    others = np.setdiff1d(np.arange(SMALL.rows), ended)
    assert (out[others].double() - want[others]).norm() / want.norm() < 1e-5


def causal_case(
    seed: int, shape: Shape, dtype: torch.dtype, suffixes: tuple[int, ...], shared: int, earlier: int
) -> Case:
    """Suffixes of prompts, each of some rows at the last positions of its unit, and three plain rows after them.

    All rows read one prefix together; the plain rows read another as well. K and V are NaN beyond the last row's end.
    """
    rng = np.random.default_rng(seed)
    page, pages = shape.page, 200
    free = iter(rng.permutation(pages))
    ranges: list[tuple[int, int, int, bool, Entries]] = []  # row_begin, row_end, level, causal, pages

    def pages_for(start: int, size: int, grows: bool) -> Entries:
        return [(int(next(free)), page if grows else min(page, size - at), start + at) for at in range(0, size, page)]

    prefix, other = pages_for(0, shared, False), pages_for(shared, 21, False)
    reads: list[Entries] = []
    lengths: list[int] = []
    for suffix in suffixes:
        own = pages_for(shared, earlier + suffix, True)
        ranges.append((len(reads), len(reads) + suffix, 2, True, own))
        lengths += range(shared + earlier + 1, shared + earlier + suffix + 1)
        reads += [prefix + own] * suffix
    plain = len(reads)
    for row in range(plain, plain + 3):
        size = int(rng.integers(1, 2 * page))
        own = pages_for(shared + 21, size, True)
        ranges.append((row, row + 1, 2, False, own))
        lengths.append(shared + 21 + size)
        reads.append(prefix + other + own)
    ranges += [(0, len(reads), 0, False, prefix), (plain, len(reads), 1, False, other)]
    flat = np.array([entry for *_, entries in ranges for entry in entries])
    built = wl.Ranges(
        *(np.array([each[field] for each in ranges]) for field in range(3)),
        page_begin=np.concatenate([[0], np.cumsum([len(entries) for *_, entries in ranges])]),
        page=flat[:, 0],
        tokens=flat[:, 1],
        first=flat[:, 2],
        causal=np.array([causal for *_, causal, _ in ranges]),
    )
    keys = []
    written = torch.zeros(pages * page, dtype=torch.bool)
    for entries, length in zip(reads, lengths, strict=True):
        slots = np.concatenate([number * page + np.arange(tokens) for number, tokens, _ in entries])
        positions = np.concatenate([first + np.arange(tokens) for _, tokens, first in entries])
        keys.append((slots, positions))
        written[slots[positions < length]] = True
    generator = torch.Generator().manual_seed(seed)
    caches = []
    for dim in (shape.qk_dim, shape.v_dim):
        cache = torch.randn(pages * page, shape.kv_heads, dim, generator=generator).to(dtype)
        cache[~written] = NAN
        caches.append(cache.view(pages, page, shape.kv_heads, dim))
    q = torch.randn(len(reads), shape.heads, shape.qk_dim, generator=generator).to(dtype)
    return Case(replace(shape, rows=len(reads)), built, np.array(lengths), keys, q, *caches)


def check_causal(case: Case, tolerance: float) -> None:
    for split in (1, 3):
        for options in ({}, {"window": 9}, {"window": 1, "softcap": 1.5}):
            work = build(case, most_pages=split, window=options.get("window"))
            assert work.causal
            out = run(case, work, case.lengths, 0.3, **options)
            want = reference(case, case.lengths, 0.3, options.get("window"), options.get("softcap"), None)
            error = (out.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
            assert error.max() < tolerance, (split, options, error)  # row by row: NaN is not below anything


@pytest.mark.parametrize(
    ("suffixes", "shared", "earlier"),
    [
        ((16, 2, 5), 40, 0),  # whole prompts' ends, one as long as a page: no page is full for all rows of it
        ((3, 9), 16, 15),  # the second page starts with the second row
        ((40, 1), 7, 50),  # more lines than a tile: two items, each with a last row of its own
    ],
)
def test_rows_of_a_causal_item_see_as_far_as_their_lengths(
    suffixes: tuple[int, ...], shared: int, earlier: int
) -> None:
    check_causal(causal_case(3, SMALL, torch.float32, suffixes, shared, earlier), 1e-5)


def test_a_row_that_ended_changes_no_other_beside_causal_items() -> None:
    """The last of those that read the prefixes among them, to whose length causal items alone may look."""
    case = causal_case(4, SMALL, torch.float32, (3, 2), 20, 5)
    lengths = case.lengths.copy()
    lengths[[5, 7]] = 0
    out = run(case, build(case, most_pages=1), lengths, 0.3)
    assert out.isfinite().all()
    want = reference(case, case.lengths, 0.3, None, None, None)
    others = [0, 1, 2, 3, 4, 6]
    assert (out[others] - want[others]).norm() / want.norm() < 1e-5


def test_work_lists_are_longest_first_and_within_the_split() -> None:
    case = make_case(2, SMALL, torch.float32)
    work = build(case, most_pages=2, capacity=3)
    for tile, items in work.items.items():
        count = int(work.counts[tile])
        assert len(items) == 3 * count
        pages = (items[:, 4] - items[:, 2])[:count]
        assert (pages.diff() <= 0).all()
        assert pages.min() >= 1 and pages.max() <= 2
        assert (items[count:] == 0).all()
        assert (items[:count, 1] * 2 <= tile).all()


def test_items_are_cut_to_the_share_of_a_block() -> None:
    """One row with 40 pages and 2 KV heads: 80 pages for 4 blocks on each multiprocessor."""
    pages = np.arange(40)
    ranges = wl.Ranges(
        row_begin=np.array([0]),
        row_end=np.array([1]),
        level=np.array([0]),
        page_begin=np.array([0, 40]),
        page=pages,
        tokens=np.full(40, 16),
        first=pages * 16,
    )
    for multiprocessors, parts in ((1, 2), (2, 4), (100, 40 // wl.MIN_PAGES)):
        work = wl.build_work(
            ranges, np.array([640]), kv_heads=2, group=2, page_size=16, multiprocessors=multiprocessors
        )
        assert work.parts == parts
        assert work.merges == (parts > 1)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 2, 64), (14, 2, 96)])
def test_native(seed: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    case = make_case(seed, Shape(40, heads, kv_heads, dim, dim, 64), dtype, most=700)
    check(case, split=3, tolerance=8e-3)
    check(case, split=None, tolerance=8e-3, window=150, softcap=20.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (7, 1, 64)])
def test_native_causal_items(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    shape = Shape(0, heads, kv_heads, dim, dim, 64)
    check_causal(causal_case(5, shape, dtype, (16, 1, 3), 150, 60), tolerance=1e-2)
