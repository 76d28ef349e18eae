"""The Triton kernels for decode over shared prefixes against their twins, and all of them against a plain reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from attention_cases import NAN, Variant
from decode_cases import DecodeCase, check_decode, decode_case
from interpreted import DEVICE, kernel, plain, run_under_interpreter, starts_interpreter

from hf_batchllm.kernels import cascade_torch
from hf_batchllm.kernels import cascade_triton as ct
from hf_batchllm.kernels import work_lists as wl

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@starts_interpreter
def test_under_the_interpreter() -> None:
    run_under_interpreter(__file__)


# -- the twins, and with them the lists --------------------------------------------------------------------------

PLAIN = [
    Variant(4, 2, 16, 16, 16, F64), Variant(6, 2, 24, 8, 16, F64, window=20), Variant(3, 3, 8, 8, 16, F32, softcap=2.0),
    Variant(16, 1, 16, 16, 16, F64, window=50, softcap=3.0), Variant(14, 2, 8, 8, 16, BF16, window=7),
    Variant(8, 1, 16, 16, 32, F64, sinks=True), Variant(10, 2, 8, 16, 16, F32, window=50, sinks=True),
    Variant(64, 1, 8, 8, 16, F64), Variant(4, 1, 16, 16, 64, F64, window=33), Variant(32, 2, 8, 8, 16, F16),
]  # fmt: skip
PLAIN_CASES = 400


def plain_case(case: int) -> DecodeCase:
    return decode_case(case, PLAIN[case % 10], rows=[6, 12, 24][case % 3], most=60, suffixes=case % 4 < 2)


@plain
@pytest.mark.parametrize("case", range(PLAIN_CASES))
def test_twins(case: int) -> None:
    check_decode(cascade_torch, plain_case(case), "cpu")


# -- the kernels under the interpreter ----------------------------------------------------------------------------

SMALL = Variant(4, 2, 16, 16, 16, F32)


def check(variant: Variant, seed: int, rows: int = 9, most: int = 70) -> None:
    check_decode(ct, decode_case(seed, variant, rows=rows, most=most), DEVICE)


@kernel
@pytest.mark.parametrize("seed", range(4))
def test_random_trees(seed: int) -> None:
    check(SMALL, seed)


@kernel
def test_many_rows_fill_every_tile() -> None:
    """Ranges of three or more blocks of 64 lines, of two, of one, and of one of 16."""
    case = decode_case(88, replace(SMALL, heads=2, kv_heads=1), rows=100, most=30)
    lines = (case.ranges.row_end - case.ranges.row_begin) * 2
    assert max(lines) > 128
    assert any((lines > 64) & (lines <= 128))
    assert any((lines > 16) & (lines <= 64))
    assert any((lines > 2) & (lines <= 16))
    check_decode(ct, case, DEVICE)


@kernel
@pytest.mark.parametrize(
    ("heads", "kv_heads", "qk_dim", "v_dim"), [(7, 1, 16, 16), (6, 2, 24, 16), (2, 2, 32, 16), (3, 1, 16, 40)]
)
def test_shapes(heads: int, kv_heads: int, qk_dim: int, v_dim: int) -> None:
    """Groups and dims that are no powers of two, and unequal dims."""
    check(Variant(heads, kv_heads, qk_dim, v_dim, 16, F32), 6, rows=6)


@kernel
@pytest.mark.parametrize("window", [1, 20, 50])
def test_window(window: int) -> None:
    check(replace(SMALL, window=window), 6)


@kernel
def test_softcap_and_sinks() -> None:
    check(replace(SMALL, softcap=1.5), 7)
    check(replace(SMALL, sinks=True), 7)
    check(replace(SMALL, dtype=F16, softcap=1.5, window=20, sinks=True), 8)


# -- the kernels on a GPU ---------------------------------------------------------------------------------------

NATIVE = [  # each is a kernel of its own to the compiler, at each tile
    Variant(32, 8, 128, 128), Variant(32, 8, 128, 128, window=150, softcap=20.0),
    Variant(28, 4, 128, 128, dtype=F16, sinks=True), Variant(16, 2, 64, 64, window=40),
    Variant(16, 2, 64, 64, dtype=F16, softcap=20.0, sinks=True), Variant(8, 8, 64, 64, dtype=F32, window=300),
    Variant(14, 2, 96, 96, window=150), Variant(10, 2, 96, 80, dtype=F16), Variant(8, 8, 80, 80, softcap=20.0),
    Variant(4, 1, 192, 128), Variant(16, 1, 192, 128, dtype=F16, window=150),
    Variant(8, 4, 256, 256, window=150, softcap=50.0), Variant(4, 1, 256, 256, dtype=F16),
    Variant(6, 2, 192, 192, sinks=True), Variant(10, 2, 128, 64, window=40, sinks=True),
    Variant(5, 5, 128, 64, dtype=F32), Variant(64, 1, 64, 64), Variant(64, 8, 64, 64, window=128, sinks=True),
    Variant(8, 2, 64, 64, 16), Variant(8, 2, 128, 128, 32, F16, window=150, softcap=20.0),
    Variant(8, 2, 96, 96, 16, F32, softcap=20.0, sinks=True), Variant(16, 1, 128, 128, 32),
    Variant(4, 2, 80, 80, 32, F32, window=40), Variant(14, 2, 64, 64, dtype=F32),
]  # fmt: skip
NATIVE_CASES, SUFFIX_CASES = 384, 96


def native_case(case: int) -> DecodeCase:
    return decode_case(case, NATIVE[case % len(NATIVE)], rows=48, most=[100, 300, 700][case // len(NATIVE) % 3])


def suffix_case(case: int) -> DecodeCase:
    """Suffixes of 2 to 16 rows among the decode rows; with every third variant, so as not to compile them all."""
    variant = NATIVE[case * 3 % len(NATIVE)]
    return decode_case(1000 + case, variant, rows=48, most=[100, 300, 700][case // 8 % 3], suffixes=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(NATIVE_CASES))
def test_native(case: int) -> None:
    check_decode(ct, native_case(case), DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(SUFFIX_CASES))
def test_native_suffixes(case: int) -> None:
    check_decode(ct, suffix_case(case), DEVICE)


@plain
@pytest.mark.parametrize("which", ["plain", "native"])
def test_everything_occurs_often(which: str) -> None:
    """Nothing is run here: what the cases are, of the twins' test and of the kernels' native one."""
    kinds: Counter[str] = Counter()
    cases = [plain_case(case) for case in range(PLAIN_CASES)]
    if which == "native":
        cases = [native_case(case) for case in range(NATIVE_CASES)] + [suffix_case(i) for i in range(SUFFIX_CASES)]
    for case in cases:
        work = case.work()
        kinds.update({kind: int(count > 0) for kind, count in case.kinds.items()})
        kinds.update([f"tile {tile}" for tile in work.items] + ["merge"] * work.merges)
        kinds["several blocks"] += bool((case.ranges.row_end - case.ranges.row_begin > 64 // case.variant.group).any())
        kinds["a row that needs no merge"] += work.direct and bool((work.row_parts.diff() == 1).any())
        kinds["a row of many parts"] += bool((work.row_parts.diff() > ct.MERGE_PARTS).any())
        kinds["rows of one unit in one item"] += any(bool(items[:, 6].any()) for items in work.items.values())
    often, at_least = (300, 40) if which == "native" else (200, 10)
    for kind in ("tile 16", "tile 64", "merge"):
        assert kinds[kind] >= often, (kind, kinds)
    for kind in (
        "ragged prefix", "one-row group", "empty range", "in no segment", "hole", "grows onto a page", "padding row",
        "ended", "window within a segment", "window beyond a segment", "range out of the window", "causal",
        "rows of one unit in one item", "several blocks", "a row that needs no merge", "a row of many parts",
    ):  # fmt: skip
        assert kinds[kind] >= at_least, (kind, kinds)


# -- single properties --------------------------------------------------------------------------------------------


def causal_case(seed: int, suffixes: tuple[int, ...], shared: int, earlier: int) -> Case:
    """Suffixes of prompts, each of some rows at the last positions of its unit, and three plain rows after them.

    All rows read one prefix together; the plain rows read another as well. K and V are NaN beyond the last row's end.
    """
    rng = np.random.default_rng(seed)
    page, free = SMALL.page, iter(rng.permutation(PAGES))
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
    written = torch.zeros(PAGES * page, dtype=torch.bool)
    for entries, length in zip(reads, lengths, strict=True):
        slots = np.concatenate([number * page + np.arange(tokens) for number, tokens, _ in entries])
        positions = np.concatenate([first + np.arange(tokens) for _, tokens, first in entries])
        keys.append((slots, positions))
        written[slots[positions < length]] = True
    caches = []
    for dim in (SMALL.qk_dim, SMALL.v_dim):
        cache = torch.randn(PAGES * page, SMALL.kv_heads, dim, generator=torch.Generator().manual_seed(seed + dim))
        cache[~written] = NAN
        caches.append(cache.view(PAGES, page, SMALL.kv_heads, dim))
    q = torch.randn(len(reads), SMALL.heads, SMALL.qk_dim, generator=torch.Generator().manual_seed(seed))
    return Case(replace(SMALL, rows=len(reads)), built, np.array(lengths), keys, q, *caches)


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
    case = causal_case(3, suffixes, shared, earlier)
    for split in (1, 3):
        for options in ({}, {"window": 9}, {"window": 1, "softcap": 1.5}):
            work = build(case, most_pages=split, window=options.get("window"))
            assert work.causal
            out = run(case, work, case.lengths, 0.3, **options)
            want = reference(case, case.lengths, 0.3, options.get("window"), options.get("softcap"), None)
            error = (out - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
            assert error.max() < 1e-5, (split, options, error)  # row by row: NaN is not below anything


def test_a_row_that_ended_changes_no_other_beside_causal_items() -> None:
    """The last of those that read the prefixes among them, to whose length causal items alone may look."""
    case = causal_case(4, (3, 2), 20, 5)
    lengths = case.lengths.copy()
    lengths[[5, 7]] = 0
    out = run(case, build(case, most_pages=1), lengths, 0.3)
    assert out.isfinite().all()
    want = reference(case, case.lengths, 0.3, None, None, None)
    others = [0, 1, 2, 3, 4, 6]
    assert (out[others] - want[others]).norm() / want.norm() < 1e-5


def test_work_lists_are_longest_first_and_within_the_split() -> None:
    case = decode_case(2, SMALL, rows=9, most=70)
    work = case.work(most_pages=2, capacity=3)
    for tile, items in work.items.items():
        count = int(work.counts[tile])
        assert len(items) == 3 * count
        pages = (items[:, 4] - items[:, 2])[:count]
        assert (pages.diff() <= 0).all()
        assert pages.min() >= 1 and pages.max() <= 2
        assert (items[count:] == 0).all()
        assert (items[:count, 1] * 2 <= tile).all()


def one_range(pages: int, rows: int = 1) -> wl.Ranges:
    page = np.arange(pages)
    zero = np.zeros(1, dtype=np.int64)
    return wl.Ranges(zero, zero + rows, zero, np.array([0, pages]), page, np.full(pages, 16), page * 16)


def test_items_are_cut_to_the_share_of_a_block() -> None:
    """One row with 40 pages and 2 KV heads: 80 pages for 4 blocks on each multiprocessor."""
    for multiprocessors, parts in ((1, 2), (2, 4), (100, 40 // wl.MIN_PAGES)):
        work = wl.build_work(
            one_range(40), np.array([640]), kv_heads=2, group=2, page_size=16, multiprocessors=multiprocessors
        )
        assert work.parts == parts
        assert work.merges == (parts > 1)


@pytest.mark.parametrize("module", [cascade_torch, pytest.param(ct, marks=kernel)])
def test_a_line_that_sees_nothing(module: ModuleType) -> None:
    """A row has yet to reach the second of its two parts; another one has no part at all."""
    work = wl.build_work(
        one_range(2), np.array([10, 0]), kv_heads=1, group=2, page_size=16, multiprocessors=1, most_pages=1
    ).to(DEVICE)
    k, v = (torch.full((2, 16, 1, 16), NAN, device=DEVICE) for _ in range(2))
    k[0, :10], v[0, :10] = 1.0, 2.0
    out, part_out = (torch.full((2, 2, 16), NAN, device=DEVICE) for _ in range(2))
    part_lse = torch.full((2, 2), NAN, device=DEVICE)
    lengths = torch.tensor([10, 0], dtype=torch.int32, device=DEVICE)
    module.attend_items(16, torch.ones_like(out), k, v, out, part_out, part_lse, work, lengths, 0.25)
    assert part_lse[1].isneginf().all() and (part_out[1] == 0).all()
    assert torch.allclose(part_lse[0].cpu(), torch.tensor(4.0 / np.log(2) + np.log2(10), dtype=F32))
    assert out.isnan().all()
    module.merge_parts(out, part_out, part_lse, work)
    assert torch.allclose(out[0].cpu(), torch.tensor(2.0))
    assert (out[1] == 0).all()
