"""The Triton kernels for decode over shared prefixes against their references, and all against plain attention."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from support_attention_cases import NAN, Variant
from support_cases import SOME
from support_decode_cases import DecodeCase, check_decode, decode_case
from support_kernels import DEVICE, kernel, plain

from hf_batchllm.kernels.cards import Card
from hf_batchllm.kernels.lists import work_lists as wl
from hf_batchllm.kernels.reference import decode_torch
from hf_batchllm.kernels.triton import decode_triton as ct

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


# -- the references, and with them the lists --------------------------------------------------------------------------

PLAIN = [
    Variant(4, 2, 16, 16, 16, F64), Variant(6, 2, 24, 8, 16, F64, window=20), Variant(3, 3, 8, 8, 16, F32, softcap=2.0),
    Variant(16, 1, 16, 16, 16, F64, window=50, softcap=3.0), Variant(14, 2, 8, 8, 16, BF16, window=7),
    Variant(8, 1, 16, 16, 32, F64, sinks=True), Variant(10, 2, 8, 16, 16, F32, window=50, sinks=True),
    Variant(64, 1, 8, 8, 16, F64), Variant(4, 1, 16, 16, 64, F64, window=33), Variant(32, 2, 8, 8, 16, F16),
]  # fmt: skip
PLAIN_CASES = 160


def plain_case(case: int) -> DecodeCase:
    return decode_case(case, PLAIN[case % 10], rows=[6, 12, 24][case % 3], most=60, suffixes=16 * (case % 4 < 2))


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("case", range(PLAIN_CASES))
def test_references(case: int) -> None:
    check_decode(decode_torch, plain_case(case), "cpu")


# -- the kernels under the interpreter ----------------------------------------------------------------------------

SMALL = Variant(4, 2, 16, 16, 16, F32)


def check(variant: Variant, seed: int, rows: int = 9, most: int = 70, suffixes: int = 0) -> None:
    check_decode(ct, decode_case(seed, variant, rows=rows, most=most, suffixes=suffixes), DEVICE)


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("seed", range(2))
def test_random_trees(seed: int) -> None:
    check(SMALL, seed)


@kernel
def test_many_rows_fill_every_tile() -> None:
    """Ranges of three or more blocks of 64 lines, of two, of one, and of one of 16."""
    case = decode_case(88, replace(SMALL, heads=8, kv_heads=1), rows=25, most=30)
    lines = (case.ranges.row_end - case.ranges.row_begin) * 8
    assert max(lines) > 128
    assert any((lines > 64) & (lines <= 128))
    assert any((lines > 16) & (lines <= 64))
    assert any(lines <= 16)
    check_decode(ct, case, DEVICE)


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize(
    ("heads", "kv_heads", "qk_dim", "v_dim"), [(7, 1, 16, 16), (6, 2, 24, 16), (2, 2, 32, 16), (3, 1, 16, 40)]
)
def test_shapes(heads: int, kv_heads: int, qk_dim: int, v_dim: int) -> None:
    """Groups and dims that are no powers of two, and unequal dims."""
    check(Variant(heads, kv_heads, qk_dim, v_dim, 16, F32), 6, rows=6)


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("window", [1, 20, 50])
def test_window(window: int) -> None:
    check(replace(SMALL, window=window), 6)


@kernel
def test_softcap_and_sinks() -> None:
    if not SOME:
        check(replace(SMALL, softcap=1.5), 7, rows=5, most=40)
        check(replace(SMALL, sinks=True), 7, rows=5, most=40)
    check(replace(SMALL, dtype=F16, softcap=1.5, window=20, sinks=True), 8, rows=6)


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize(
    ("seed", "variant", "rows", "longest"),
    [
        (39, SMALL, 16, 6),
        (131, replace(SMALL, window=9), 16, 6),
        (37, replace(SMALL, window=1, softcap=1.5), 9, 5),
        (153, replace(SMALL, heads=8, kv_heads=1), 30, 20),  # more lines than a tile has: several items of one unit
    ],
)
def test_suffixes(seed: int, variant: Variant, rows: int, longest: int) -> None:
    """The ends of prompts, of some rows each, among decode rows: of one unit a row sees as far as its own length."""
    case = decode_case(seed, variant, rows=rows, most=40, suffixes=longest)
    in_unit = (case.ranges.row_end - case.ranges.row_begin)[case.ranges.causal]
    assert 1 < len(in_unit) < sum(in_unit) < len(case.lengths)
    assert (max(in_unit) * variant.group > 64) == (longest == 20)
    check_decode(ct, case, DEVICE)


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
    Variant(8, 2, 128, 128, 128, window=150), Variant(8, 4, 256, 256, dtype=F32),
]  # fmt: skip
NATIVE_CASES = 16 * len(NATIVE)
WITH_SUFFIXES = NATIVE[::3]
SUFFIX_CASES = 12 * len(WITH_SUFFIXES)


def native_case(case: int) -> DecodeCase:
    most = [100, 300, 700][case // len(NATIVE) % 3]
    return decode_case(case, NATIVE[case % len(NATIVE)], rows=48, most=most)


def suffix_case(case: int) -> DecodeCase:
    variant, most = WITH_SUFFIXES[case % len(WITH_SUFFIXES)], [100, 300, 700][case // len(WITH_SUFFIXES) % 3]
    return decode_case(1000 + case, variant, rows=48, most=most, suffixes=16)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(NATIVE_CASES))
def test_native(case: int) -> None:
    check_decode(ct, native_case(case), DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(len(NATIVE)))
def test_native_with_options_for_brief_items(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Card.decode
    monkeypatch.setattr(Card, "decode", lambda card, *shape: decode(card, *shape[:3], True))
    check_decode(ct, native_case(case), DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(SUFFIX_CASES))
def test_native_suffixes(case: int) -> None:
    check_decode(ct, suffix_case(case), DEVICE)


@plain
@pytest.mark.parametrize("which", ["plain", "native"])
def test_everything_occurs_often(which: str) -> None:
    """Nothing is run here: what the cases are, of the references' test and of the kernels' native one."""
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
    often, at_least = (300, 40) if which == "native" else (PLAIN_CASES // 2, 4)
    for kind in ("tile 16", "tile 64", "merge"):
        assert kinds[kind] >= often, (kind, kinds)
    for kind in (
        "ragged prefix", "one-row group", "empty range", "in no segment", "hole", "grows onto a page", "padding row",
        "ended", "window within a segment", "window beyond a segment", "range out of the window", "causal",
        "rows of one unit in one item", "several blocks", "a row that needs no merge", "a row of many parts",
    ):  # fmt: skip
        assert kinds[kind] >= at_least, (kind, kinds)


# -- single properties --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("module", [decode_torch, pytest.param(ct, marks=kernel)])
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
