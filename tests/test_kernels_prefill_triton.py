"""The Triton kernel for prefill against its reference, and both against a plain reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from support_attention_cases import Variant
from support_cases import SOME
from support_kernels import DEVICE, kernel, plain
from support_prefill_cases import PrefillCase, check_prefill, prefill_case

from hf_batchllm.kernels.lists import work_lists as wl
from hf_batchllm.kernels.reference import prefill_torch
from hf_batchllm.kernels.triton import prefill_triton as pt

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


# -- the reference, and with it the lists -----------------------------------------------------------------------------

PLAIN = [
    Variant(4, 2, 16, 16, 16, F64), Variant(6, 2, 24, 8, 16, F64, window=20), Variant(3, 3, 8, 8, 16, F32, softcap=2.0),
    Variant(16, 1, 16, 16, 16, F64, window=50, softcap=3.0), Variant(14, 2, 8, 8, 16, BF16, window=7),
    Variant(8, 1, 16, 16, 32, F64, sinks=True), Variant(10, 2, 8, 16, 16, F32, window=50, sinks=True),
    Variant(71, 1, 8, 8, 16, F64), Variant(4, 1, 16, 16, 64, F64, window=33), Variant(32, 2, 8, 8, 16, F16),
]  # fmt: skip
PLAIN_CASES = 160


def plain_case(case: int) -> PrefillCase:
    return prefill_case(case, PLAIN[case % 10], chunks=5, most=[10, 60, 100][case % 3])


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("case", range(PLAIN_CASES))
def test_reference(case: int) -> None:
    made = plain_case(case)
    check_prefill(prefill_torch, made, max([16, 64, 128][case % 3], made.variant.group), "cpu")


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("case", range(60))
def test_reference_where_rows_see_further(case: int) -> None:
    made = prefill_case(case, PLAIN[case % 10], chunks=5, most=[10, 60, 100][case % 3], two_way=True)
    check_prefill(prefill_torch, made, max([16, 64, 128][case % 3], made.variant.group), "cpu")


# -- the kernel under the interpreter ------------------------------------------------------------------------------

SMALL = Variant(4, 2, 16, 16, 16, F32)


def check(variant: Variant, seed: int, chunks: int = 4, most: int = 60, tile: int | None = None) -> None:
    if tile is None:
        tile = pt.launch_options(variant.group, variant.qk_dim, variant.v_dim, variant.dtype.itemsize)["tile"]
    check_prefill(pt, prefill_case(seed, variant, chunks=chunks, most=most), tile, DEVICE)


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("seed", range(1, 3))
def test_random_chunks(seed: int) -> None:
    check(SMALL, seed)


@kernel
def test_half_precision() -> None:
    check(replace(SMALL, dtype=F16), 11)


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize(
    ("heads", "kv_heads", "qk_dim", "v_dim"), [(7, 1, 16, 16), (6, 2, 24, 16), (2, 2, 32, 16), (3, 1, 16, 40)]
)
def test_shapes(heads: int, kv_heads: int, qk_dim: int, v_dim: int) -> None:
    """Groups and dims that are no powers of two, and unequal dims."""
    check(Variant(heads, kv_heads, qk_dim, v_dim, 16, F32), 6, chunks=2)


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("window", [1, 20, 500])
def test_window(window: int) -> None:
    check(replace(SMALL, window=window), 8)


@kernel
def test_softcap_and_sinks() -> None:
    if not SOME:
        check(replace(SMALL, softcap=1.5), 9)
        check(replace(SMALL, sinks=True), 9)
    check(replace(SMALL, window=5, softcap=1.5, sinks=True), 9)


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("window", [None, 7, 30])
@pytest.mark.parametrize("tile", [16, 64])
def test_rows_that_see_further(tile: int, window: int | None) -> None:
    """As in an image whose tokens see each other both ways."""
    case = prefill_case(17, replace(SMALL, window=window), chunks=4, most=60, two_way=True)
    assert case.kinds["runs"] > 2
    check_prefill(pt, case, tile, DEVICE)


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("tile", [16, 64])
def test_tiles(tile: int) -> None:
    check(SMALL, 10, chunks=2, tile=tile)


@kernel
def test_a_chunk_of_one_row() -> None:
    """Some rows alone, some whose prefix ends with their page."""
    case = prefill_case(13, SMALL, chunks=6, most=2)
    assert (case.chunks.row_end - case.chunks.row_begin == 1).all()
    check_prefill(pt, case, 16, DEVICE)


# -- the kernel on a GPU ------------------------------------------------------------------------------------------

NATIVE = [  # each is a kernel of its own to the compiler
    Variant(32, 8, 128, 128), Variant(32, 8, 128, 128, window=150, softcap=20.0),
    Variant(28, 4, 128, 128, dtype=F16, sinks=True), Variant(16, 2, 64, 64, window=40),
    Variant(16, 2, 64, 64, dtype=F16, softcap=20.0, sinks=True), Variant(8, 8, 64, 64, dtype=F32, window=300),
    Variant(14, 2, 96, 96, window=150), Variant(10, 2, 96, 80, dtype=F16), Variant(8, 8, 80, 80, softcap=20.0),
    Variant(4, 1, 192, 128), Variant(16, 1, 192, 128, dtype=F16, window=150),
    Variant(8, 4, 256, 256, window=150, softcap=50.0), Variant(4, 1, 256, 256, dtype=F16),
    Variant(6, 2, 192, 192, sinks=True), Variant(10, 2, 128, 64, window=40, sinks=True),
    Variant(5, 5, 128, 64, dtype=F32), Variant(71, 1, 64, 64), Variant(71, 1, 64, 64, dtype=F16, window=64),
    Variant(64, 8, 64, 64, window=128, sinks=True), Variant(8, 2, 64, 64, 16),
    Variant(8, 2, 128, 128, 32, F16, window=150, softcap=20.0), Variant(16, 1, 128, 128, 32),
    Variant(8, 2, 96, 96, 16, F32, softcap=20.0, sinks=True), Variant(4, 2, 80, 80, 32, F32, window=40),
    Variant(14, 2, 64, 64, dtype=F32), Variant(71, 1, 128, 128, dtype=F32), Variant(64, 1, 128, 128, softcap=20.0),
    Variant(8, 4, 256, 256, dtype=F32), Variant(8, 2, 128, 128, 128, window=150),
]  # fmt: skip
NATIVE_CASES = 12 * len(NATIVE)


def native_case(case: int) -> PrefillCase:
    most = [40, 200, 400][case // len(NATIVE) % 3]
    return prefill_case(case, NATIVE[case % len(NATIVE)], chunks=5, most=most)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(NATIVE_CASES))
def test_native(case: int) -> None:
    made = native_case(case)
    variant = made.variant
    chosen = pt.launch_options(variant.group, variant.qk_dim, variant.v_dim, variant.dtype.itemsize)
    tile, options = chosen["tile"], None
    if case % len(NATIVE) % 5 == 0 and case // len(NATIVE) % 2:  # a larger tile: for several blocks, or for one
        tile *= 2
        if variant.dtype != F32 and max(variant.qk_dim, variant.v_dim) <= 128:
            options = {"num_warps": 4, "num_stages": 2}
    elif case // len(NATIVE) % 4 != 3:
        tile = chosen.get("wide", tile)  # a kernel of its own
    check_prefill(pt, made, tile, DEVICE, options)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(2 * len(NATIVE)))
def test_native_where_rows_see_further(case: int) -> None:
    variant = NATIVE[case % len(NATIVE)]
    made = prefill_case(case, variant, chunks=5, most=[200, 400][case // len(NATIVE)], two_way=True)
    tile = pt.launch_options(variant.group, variant.qk_dim, variant.v_dim, variant.dtype.itemsize)["tile"]
    check_prefill(pt, made, tile, DEVICE)


@plain
@pytest.mark.parametrize(
    ("chunks", "rows", "takes"), [(8, 1000, True), (1, 500, False), (9, 400, False), (40, 70, False)]
)
def test_large_tiles_where_they_pay(chunks: int, rows: int, takes: bool) -> None:
    """Not where blocks are few or short, or half empty."""
    pages = -(-rows // 64)
    first = np.tile(np.arange(pages) * 64, chunks)
    layout = wl.Chunks(
        row_begin=np.arange(chunks) * rows, row_end=(np.arange(chunks) + 1) * rows, position=np.zeros(chunks, int),
        page_begin=np.arange(chunks + 1) * pages, page=np.arange(chunks * pages),
        tokens=np.full(chunks * pages, 64), first=first,
    )  # fmt: skip
    work = wl.build_prefill(layout, group=4, page_size=64, tile=64, wide=192, kv_heads=8)
    assert work.tile == (192 if takes else 64)
    further = replace(layout, sees_to=np.tile(np.arange(rows) + 1, chunks))
    assert wl.build_prefill(further, group=4, page_size=64, tile=64, wide=192, kv_heads=8).tile == 64


@plain
def test_each_device_has_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have cards of two generations."""
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index == 102 else (9, 0))
    wide = []
    for device in (101, 102, 103):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        wide.append("wide" in pt.launch_options(4, 128, 128, 2))
    assert wide == [True, False, True]


@plain
@pytest.mark.parametrize("which", ["plain", "native"])
def test_everything_occurs_often(which: str) -> None:
    """Nothing is run here: what the cases are, of the reference's test and of the kernel's native one."""
    kinds: Counter[str] = Counter()
    for case in range(NATIVE_CASES if which == "native" else PLAIN_CASES):
        made = native_case(case) if which == "native" else plain_case(case)
        work = made.work(max(64, made.variant.group))
        items = work.items[: int(work.count)]
        kinds.update({kind: int(count > 0) for kind, count in made.kinds.items()})
        kinds["prefill"] += 1
        kinds["pages without masks"] += bool((items[:, 7] > items[:, 6]).any())
        kinds["several items"] += len(items) > len(made.chunks.row_begin)
    at_least = 20 if which == "native" else 10
    for kind in (
        "shared prefix", "ragged prefix", "no prefix", "resumed", "pages ahead", "one row", "window within the chunk",
        "window beyond the chunk", "prefix out of the window", "pages without masks", "several items",
    ):  # fmt: skip
        assert kinds[kind] >= at_least, (kind, kinds)


# -- the lists ----------------------------------------------------------------------------------------------------


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("window", [None, 1, 9, 40])
@pytest.mark.parametrize("seed", range(20))
def test_lists_hold_each_page_that_a_row_sees_once(seed: int, window: int | None) -> None:
    """In plain Python: what is listed for an item, what of it goes without masks, and which rows it writes."""
    case = prefill_case(seed, replace(SMALL, window=window), chunks=4, most=60)
    chunks, page_size = case.chunks, SMALL.page
    work = case.work(tile=16, capacity=3)
    count = int(work.count)
    assert len(work.items) == 3 * count
    assert (work.items[count:] == 0).all()
    assert (work.items[:count, 8].diff() <= 0).all(), "longest first"
    rows_written: list[int] = []
    for row, rows, position, short, shorts, rest, full_from, full_to, pages in work.items[:count, :9].tolist():
        rows_written += range(row, row + rows)
        assert rows * 2 <= 16
        chunk = int(np.searchsorted(chunks.row_begin, row, side="right")) - 1
        assert position == chunks.position[chunk] + row - chunks.row_begin[chunk]
        listed = [work.entries[i + (short if i < shorts else rest)].tolist()[:3] for i in range(pages)]
        mine = slice(chunks.page_begin[chunk], chunks.page_begin[chunk + 1])
        last = position + rows - 1
        earliest = 0 if window is None else max(0, position - window + 1)
        expected = [
            [page, tokens, first]
            for page, tokens, first in zip(chunks.page[mine], chunks.tokens[mine], chunks.first[mine], strict=True)
            if first <= last and first + tokens > earliest
        ]
        assert sorted(listed) == sorted(expected)
        whole = [
            tokens >= page_size and first + page_size <= position + 1 and (window is None or first > last - window)
            for _, tokens, first in listed
        ]
        assert whole == [full_from <= i < full_to for i in range(pages)]
    expected_rows = [row for b, e in zip(chunks.row_begin, chunks.row_end, strict=True) for row in range(b, e)]
    assert sorted(rows_written) == expected_rows
