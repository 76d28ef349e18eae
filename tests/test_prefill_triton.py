"""The Triton kernel for prefill against its twin in float64.

Without a GPU the kernel runs under Triton's interpreter. It must be chosen before anything imports Triton, and then
holds for the whole process; so unless it was, one test here runs the others in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hf_batchllm.kernels import prefill_triton as pt
from hf_batchllm.kernels import work_lists as wl
from hf_batchllm.kernels.attention_torch import apply_sinks, attend

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
NAN = float("nan")
Entries = list[tuple[int, int, int]]  # page, tokens, position of the first


@dataclass
class Shape:
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    page: int


@dataclass
class Case:
    shape: Shape
    chunks: wl.Chunks
    keys: list[np.ndarray]  # of each chunk: the slots of the keys at positions 0, 1, ...
    q: torch.Tensor
    k: torch.Tensor  # [pages, page, kv_heads, qk_dim]
    v: torch.Tensor


def make_case(seed: int, shape: Shape, dtype: torch.dtype, chunks: int = 4, most: int = 60) -> Case:
    """Chunks under no, one or two prefixes with ragged ends, which some of them share, at any place in their unit.

    Whatever no row may ever see is NaN, in K and in V: the rest of a prefix's last page, and what of a unit's pages
    has yet to be computed. Some rows of the batch belong to no chunk.
    """
    rng = np.random.default_rng(seed)
    pages = 1 + chunks * 4 * (most // shape.page + 2)
    free = iter(rng.permutation(pages))

    def pages_for(start: int, size: int, tokens: int) -> Entries:
        return [(int(next(free)), min(shape.page, tokens - at), start + at) for at in range(0, size, shape.page)]

    row_begin, row_end, position, reads, keys = [], [], [], [], []
    prefix: Entries = []  # what the last chunk read below its unit
    row = 0
    written = np.zeros(pages * shape.page, dtype=bool)
    for _ in range(chunks):
        if rng.random() < 0.6:
            prefix, start = [], 0
            for _ in range(int(rng.integers(0, 3))):
                size = int(rng.integers(1, most))
                prefix += pages_for(start, size, size)
                start += size
        start = sum(tokens for _, tokens, _ in prefix)
        earlier = int(rng.integers(0, most)) if rng.random() < 0.5 else 0  # computed in steps before
        rows = int(rng.integers(1, most))
        # A unit's last page counts as full where it may still grow into it, and may lie ahead of the chunk.
        size = earlier + rows + (int(rng.integers(0, most)) if rng.random() < 0.3 else 0)
        own = pages_for(start, size, size if rng.random() < 0.3 else shape.page * (size + shape.page))
        entries = prefix + own
        slots = np.concatenate([page * shape.page + np.arange(tokens) for page, tokens, _ in entries])
        row += int(rng.integers(0, 3))
        row_begin.append(row)
        row += rows
        row_end.append(row)
        position.append(start + earlier)
        reads.append(entries)
        keys.append(slots[: start + earlier + rows])
        written[keys[-1]] = True
    row += 1
    flat = np.array([entry for entries in reads for entry in entries]).reshape(-1, 3)
    built = wl.Chunks(
        row_begin=np.array(row_begin),
        row_end=np.array(row_end),
        position=np.array(position),
        page_begin=np.concatenate([[0], np.cumsum([len(entries) for entries in reads])]),
        page=flat[:, 0],
        tokens=flat[:, 1],
        first=flat[:, 2],
    )
    generator = torch.Generator().manual_seed(seed)

    def cache(dim: int) -> torch.Tensor:
        made = torch.randn(pages * shape.page, shape.kv_heads, dim, generator=generator).to(dtype)
        made[~torch.from_numpy(written)] = NAN
        return made.view(pages, shape.page, shape.kv_heads, dim)

    q = torch.randn(row, shape.heads, shape.qk_dim, generator=generator).to(dtype)
    return Case(shape, built, keys, q, cache(shape.qk_dim), cache(shape.v_dim))


def reference(
    case: Case, scale: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """NaN where no chunk has a row."""
    out = torch.full((len(case.q), case.shape.heads, case.shape.v_dim), NAN, dtype=torch.float64)
    chunks = case.chunks
    for begin, end, first, slots in zip(chunks.row_begin, chunks.row_end, chunks.position, case.keys, strict=True):
        k, v = (cache.flatten(0, 1)[torch.from_numpy(slots)].double() for cache in (case.k, case.v))
        at, position = np.arange(len(slots))[None], np.arange(first, first + end - begin)[:, None]
        mask = (at <= position) & (at > position - (window or len(slots)))
        rows, lse = attend(case.q[begin:end].double(), k, v, scale, mask=torch.from_numpy(mask), softcap=softcap)
        if sinks is not None:
            apply_sinks(rows, lse, sinks.double())
        out[begin:end] = rows
    return out


def check(
    case: Case,
    tolerance: float,
    *,
    tile: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    options: dict[str, int] | None = None,
) -> None:
    if not GPU and not INTERPRETED:
        pytest.skip("is run by test_under_the_interpreter")
    shape = case.shape
    scale = 1.3 * shape.qk_dim**-0.5
    if tile is None:
        group = shape.heads // shape.kv_heads
        tile = pt.launch_options(group, shape.qk_dim, shape.v_dim, case.q.element_size())["tile"]
    work = build(case, tile=tile, window=window, capacity=2).to(DEVICE)
    out = torch.full((len(case.q), shape.heads, shape.v_dim), NAN, dtype=case.q.dtype, device=DEVICE)
    q, k, v = case.q.to(DEVICE), case.k.to(DEVICE), case.v.to(DEVICE)
    on_device = sinks if sinks is None else sinks.to(DEVICE)
    pt.attend_chunks(q, k, v, out, work, scale, window=window, softcap=softcap, sinks=on_device, options=options)
    got, want = out.cpu().double(), reference(case, scale, window, softcap, sinks)
    assert (got.isnan() == want.isnan()).all(), "a row that was left out, or written though no chunk has it"
    # Row by row: a long chunk must not hide a short one.
    error = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    assert error.nan_to_num(0.0).max() < tolerance, f"{error.nan_to_num(0.0).max()}"


def build(case: Case, **options: Any) -> wl.PrefillWork:
    return wl.build_prefill(
        case.chunks, group=case.shape.heads // case.shape.kv_heads, page_size=case.shape.page, **options
    )


@pytest.mark.skipif(GPU or INTERPRETED, reason="the kernel runs in this process")
def test_under_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


SMALL = Shape(heads=4, kv_heads=2, qk_dim=16, v_dim=16, page=16)


@pytest.mark.parametrize("seed", range(1, 4))
def test_random_chunks(seed: int) -> None:
    check(make_case(seed, SMALL, torch.float32), 1e-5)


def test_half_precision() -> None:
    check(make_case(11, SMALL, torch.float16), 3e-3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "qk_dim", "v_dim"), [(7, 1, 16, 16), (6, 2, 24, 16), (2, 2, 32, 16), (3, 1, 16, 40)]
)
def test_shapes(heads: int, kv_heads: int, qk_dim: int, v_dim: int) -> None:
    """Groups and dims that are no powers of two, and unequal dims."""
    check(make_case(6, Shape(heads, kv_heads, qk_dim, v_dim, 16), torch.float32, chunks=2), 1e-5)


@pytest.mark.parametrize("window", [1, 20, 500])
def test_window(window: int) -> None:
    check(make_case(8, SMALL, torch.float32), 1e-5, window=window)


def test_softcap_and_sinks() -> None:
    case = make_case(9, SMALL, torch.float32)
    sinks = torch.linspace(-1, 2, SMALL.heads)
    check(case, 1e-5, softcap=1.5)
    check(case, 1e-5, sinks=sinks)
    check(case, 1e-5, window=5, softcap=1.5, sinks=sinks)


@pytest.mark.parametrize("tile", [16, 64])
def test_tiles(tile: int) -> None:
    check(make_case(10, SMALL, torch.float32, chunks=2), 1e-5, tile=tile)


def test_a_chunk_of_one_row() -> None:
    """Some rows alone, some whose prefix ends with their page."""
    case = make_case(13, SMALL, torch.float32, chunks=6, most=2)
    assert (case.chunks.row_end - case.chunks.row_begin == 1).all()
    check(case, 1e-5)


@pytest.mark.parametrize("window", [None, 1, 9, 40])
@pytest.mark.parametrize("seed", range(20))
def test_lists_hold_each_page_that_a_row_sees_once(seed: int, window: int | None) -> None:
    """In plain Python: what is listed for an item, what of it goes without masks, and which rows it writes."""
    case = make_case(seed, SMALL, torch.float32)
    chunks, page_size = case.chunks, SMALL.page
    work = build(case, tile=16, window=window, capacity=3)
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


NATIVE_SHAPES = [
    (32, 8, 128, 128), (16, 2, 64, 64), (14, 2, 96, 96), (8, 8, 80, 80), (4, 1, 192, 128), (8, 4, 256, 256),
    (6, 2, 192, 192), (71, 1, 64, 64), (5, 5, 128, 64), (28, 4, 128, 128),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(("heads", "kv_heads", "qk_dim", "v_dim"), NATIVE_SHAPES)
def test_native(seed: int, heads: int, kv_heads: int, qk_dim: int, v_dim: int) -> None:
    """300 random cases. Which options go together is drawn too, from few sets: each is a kernel of its own."""
    rng = np.random.default_rng(seed)
    dtype, tolerance = [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 2e-5)][seed % 3]
    sinks = torch.linspace(-1, 2, heads)
    options = [{}, {"window": 150}, {"softcap": 20.0, "sinks": sinks}, {"window": 64, "softcap": 20.0}][seed % 4]
    if dtype != torch.float32 and seed % 5 < 2 and heads // kv_heads <= 64:  # another tile than by default
        options = options | {"tile": 64, "options": {"num_warps": 4, "num_stages": 2}}
    shape = Shape(heads, kv_heads, qk_dim, v_dim, 64)
    case = make_case(seed, shape, dtype, chunks=int(rng.integers(1, 6)), most=int(rng.choice([40, 200, 400])))
    check(case, tolerance, **options)
