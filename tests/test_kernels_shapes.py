"""Which shapes the Triton attention kernels take: what they are launched with, what fits a Hopper card, what is right.

What fits is asked of the compiler, which needs no GPU. What is right is asked of the kernels, under Triton's
interpreter where there is no GPU (see tests/support_kernels.py).
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from support_kernels import DEVICE, kernel, plain
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from hf_batchllm.kernels.lists import work_lists as wl
from hf_batchllm.kernels.reference.attention_parts_torch import attend
from hf_batchllm.kernels.triton import decode_triton as ct
from hf_batchllm.kernels.triton import prefill_triton as pt
from hf_batchllm.kernels.triton.pages_triton import by_page, unsupported

SHARED_MEMORY = 232_448  # bytes that a block may have on Hopper
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TYPES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", torch.int32: "i32"}
NAN = float("nan")


class Compiler:
    """Stands where a kernel does, and compiles for Hopper what is launched."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.made: list[CompiledKernel] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, *args: Any, num_warps: int, num_stages: int, **constants: Any) -> None:
        names = self.source.arg_names
        kinds, aligned = dict.fromkeys(constants, "constexpr"), {}
        for at, value in enumerate(args):
            if isinstance(value, TensorDescriptor):
                kinds[names[at]] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
            elif isinstance(value, torch.Tensor):
                kinds[names[at]] = "*" + TYPES[value.dtype]
                aligned[(at,)] = [["tt.divisibility", 16]]
            else:
                kinds[names[at]] = "fp32"
        source = ASTSource(self.source, kinds, {(names.index(name),): of for name, of in constants.items()}, aligned)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        self.made.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


def compile_decode(
    patch: pytest.MonkeyPatch,
    tile: int,
    group: int,
    dims: tuple[int, int],
    page: int,
    dtype: torch.dtype,
    full: bool,
    brief: bool,
) -> CompiledKernel:
    """``full``: with a window, a soft cap and causal items."""
    compiler = Compiler(ct._attend_items)
    patch.setattr(ct, "_attend_items", compiler)
    k, v = (torch.zeros(1, page, 2, dim, dtype=dtype) for dim in dims)
    q, out = (torch.zeros(1, 2 * group, dim, dtype=dtype) for dim in dims)
    number = torch.zeros(1, dtype=torch.int32)
    work = SimpleNamespace(
        items={tile: number}, counts={tile: number}, entries=number, row_parts=number, causal=full, brief=brief
    )  # fmt: skip
    options = {"window": 100, "softcap": 20.0} if full else {}
    part = torch.zeros(1)
    ct.attend_items(tile, q, k, v, out, part, part, work, number, 1.0, **options)
    return compiler.made[0]


def compile_prefill(
    patch: pytest.MonkeyPatch,
    group: int,
    dims: tuple[int, int],
    page: int,
    dtype: torch.dtype,
    full: bool,
    two_way: bool = False,
) -> CompiledKernel:
    """``full``: with a window, a soft cap and sinks. ``two_way``: some rows see further than to themselves."""
    compiler = Compiler(pt._attend_chunks)
    patch.setattr(pt, "_attend_chunks", compiler)
    k, v = (torch.zeros(1, page, 2, dim, dtype=dtype) for dim in dims)
    q, out = (torch.zeros(1, 2 * group, dim, dtype=dtype) for dim in dims)
    number = torch.zeros(1, dtype=torch.int32)
    tile = pt.launch_options(group, *dims, dtype.itemsize)["tile"]
    work = wl.PrefillWork(number, number, number, tile, number if two_way else None)
    options = {"window": 100, "softcap": 20.0, "sinks": out[0, :, 0]} if full else {}
    pt.attend_chunks(q, k, v, out, work, 1.0, **options)
    return compiler.made[0]


hopper = pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="Triton has no compiler for Hopper here")


# The widest of what each choice of warps and stages is for; what has the most operands on chip is near the limit.
@plain
@hopper
@pytest.mark.parametrize(
    ("tile", "group", "dims", "page", "dtype", "full", "brief"),
    [
        (16, 4, (128, 128), 64, BF16, False, False),
        (16, 4, (128, 128), 64, BF16, False, True),
        (16, 7, (256, 256), 128, FP16, True, False),
        (64, 4, (128, 128), 64, BF16, False, False),
        (64, 5, (256, 256), 128, BF16, True, False),
        (128, 71, (8, 8), 16, BF16, False, False),
        (64, 3, (128, 128), 32, FP32, False, False),
        (16, 1, (192, 256), 128, FP32, False, False),
    ],
)
def test_decode_fits_a_hopper_card(
    monkeypatch: pytest.MonkeyPatch,
    tile: int,
    group: int,
    dims: tuple[int, int],
    page: int,
    dtype: torch.dtype,
    full: bool,
    brief: bool,
) -> None:
    made = compile_decode(monkeypatch, tile, group, dims, page, dtype, full, brief)
    assert made.metadata.shared <= SHARED_MEMORY


@plain
@hopper
@pytest.mark.parametrize(
    ("group", "dims", "page", "dtype", "full"),
    [
        (4, (128, 128), 64, BF16, True),
        (1, (256, 256), 128, FP16, True),
        (71, (96, 80), 16, BF16, False),
        (8, (128, 128), 32, FP32, True),
    ],
)
def test_prefill_fits_a_hopper_card(
    monkeypatch: pytest.MonkeyPatch, group: int, dims: tuple[int, int], page: int, dtype: torch.dtype, full: bool
) -> None:
    made = compile_prefill(monkeypatch, group, dims, page, dtype, full)
    assert made.metadata.shared <= SHARED_MEMORY


@plain
@hopper
def test_images_seen_both_ways_take_no_more_on_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = []
    for two_way in (False, True):
        with monkeypatch.context() as patch:
            shared.append(compile_prefill(patch, 2, (256, 256), 64, BF16, False, two_way).metadata.shared)
    assert shared[0] == shared[1]


@plain
@hopper
def test_two_blocks_of_the_usual_shape_share_a_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 KB of each block's is the system's, and a multiprocessor has one more than a block may have."""
    made = compile_prefill(monkeypatch, 4, (128, 128), 64, BF16, False)
    assert 2 * (made.metadata.shared + 1024) <= SHARED_MEMORY + 1024


# What is right.


def make(
    heads: int, kv_heads: int, dims: tuple[int, int], page: int, rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
    """Of ``rows`` rows: q, K and V, which pages each reads and how far it sees. Beyond that K and V are NaN.

    The first two pages are shared by all rows, and the second of them is not full; then each has two of its own.
    """
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(rows, heads, dims[0], generator=generator).to(dtype)
    pages = 1 + torch.randperm(2 + 2 * rows, generator=generator).numpy()
    table = np.concatenate([np.tile(pages[:2], (rows, 1)), pages[2:].reshape(rows, 2)], axis=1)  # [rows, 4]
    own = 1 + np.arange(rows) * 53 % (2 * page)
    k, v = (torch.full((3 + 2 * rows, page, kv_heads, dim), NAN, dtype=dtype) for dim in dims)
    for cache in (k, v):
        for row in range(rows):
            for number, tokens in zip(table[row], (page, shared_end(page), own[row], own[row] - page), strict=True):
                filled = cache[number, : max(0, tokens)]
                filled.copy_(torch.randn(filled.shape, generator=generator))
    return q, k, v, table, page + shared_end(page) + own


def shared_end(page: int) -> int:
    return page // 2 + 1


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: np.ndarray, lengths: np.ndarray, scale: float
) -> torch.Tensor:
    """[rows, heads, v_dim] float64"""
    page = k.shape[1]
    out = []
    for row, length in enumerate(lengths):
        keys, values = (
            torch.cat(
                [cache[table[row, 0]], cache[table[row, 1], : shared_end(page)], *cache[table[row, 2:]]]
            )[:length].double()
            for cache in (k, v)
        )  # fmt: skip
        out.append(attend(q[row : row + 1].double(), keys, values, scale)[0])
    return torch.cat(out)


SHAPES = [  # none in bfloat16, which the interpreter takes for integers
    (71, 1, (16, 16), 16, FP32),  # a group wider than a block
    (7, 1, (16, 16), 16, FP16),
    (15, 3, (16, 24), 32, FP32),
    (2, 1, (8, 8), 16, FP16),  # less than a product takes
    (3, 1, (4, 12), 16, FP32),
    (6, 2, (32, 16), 128, FP32),  # more than a box
]


def tolerance(dtype: torch.dtype) -> float:
    return {FP16: 2e-3, FP32: 1e-5}[dtype]


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize(("heads", "kv_heads", "dims", "page", "dtype"), SHAPES)
def test_decode_of_odd_shapes(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, dims: tuple[int, int], page: int, dtype: torch.dtype
) -> None:
    group, rows = heads // kv_heads, 6
    if group > wl.TILES[-1]:
        monkeypatch.setattr(wl, "TILES", (16, 128))  # a tile of 128 is work for two blocks
    q, k, v, table, lengths = make(heads, kv_heads, dims, page, rows, dtype)
    starts = [0, page, page + shared_end(page), 2 * page + shared_end(page)]
    # The shared pages for all rows together, then each row's own.
    ranges = wl.Ranges(
        row_begin=np.append(0, np.arange(rows)),
        row_end=np.append(rows, np.arange(rows) + 1),
        level=np.append(0, np.ones(rows, dtype=np.int64)),
        page_begin=2 * np.arange(rows + 2),
        page=np.append(table[0, :2], table[:, 2:]),
        tokens=np.append([page, shared_end(page)], np.full(2 * rows, page)),
        first=np.append(starts[:2], np.tile(starts[2:], rows)),
    )
    work = wl.build_work(
        ranges, lengths, kv_heads=kv_heads, group=group, page_size=page, multiprocessors=1, most_pages=3
    ).to(DEVICE)
    out = torch.full((rows, heads, dims[1]), NAN, dtype=dtype, device=DEVICE)
    part_out = torch.full((work.parts, heads, dims[1]), NAN, device=DEVICE)
    part_lse = torch.full((work.parts, heads), NAN, device=DEVICE)
    on_device = torch.from_numpy(lengths.astype(np.int32)).to(DEVICE)
    for tile in work.items:
        caches = by_page(k.to(DEVICE)), by_page(v.to(DEVICE))
        ct.attend_items(tile, q.to(DEVICE), *caches, out, part_out, part_lse, work, on_device, 0.3)
    ct.merge_parts(out, part_out, part_lse, work)
    want = expected(q, k, v, table, lengths, 0.3)
    assert (out.cpu().double() - want).norm() / want.norm() < tolerance(dtype)


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize(("heads", "kv_heads", "dims", "page", "dtype"), SHAPES)
def test_prefill_of_odd_shapes(heads: int, kv_heads: int, dims: tuple[int, int], page: int, dtype: torch.dtype) -> None:
    """Each row is the last of a prompt of its own, and the one before it is computed with it."""
    rows, group = 5, heads // kv_heads
    q, k, v, table, lengths = make(heads, kv_heads, dims, page, rows, dtype)
    both = torch.stack([q.roll(1, 0), q], 1).flatten(0, 1)  # [2 * rows, heads, qk_dim]
    starts = [0, page, page + shared_end(page), 2 * page + shared_end(page)]
    chunks = wl.Chunks(
        row_begin=2 * np.arange(rows),
        row_end=2 * np.arange(rows) + 2,
        position=lengths - 2,
        page_begin=4 * np.arange(rows + 1),
        page=table.ravel(),
        tokens=np.tile([page, shared_end(page), page, page], rows),
        first=np.tile(starts, rows),
    )
    tile = pt.launch_options(group, *dims, dtype.itemsize)["tile"]
    work = wl.build_prefill(chunks, group=group, page_size=page, tile=tile).to(DEVICE)
    out = torch.full((2 * rows, heads, dims[1]), NAN, dtype=dtype, device=DEVICE)
    pt.attend_chunks(both.to(DEVICE), by_page(k.to(DEVICE)), by_page(v.to(DEVICE)), out, work, 0.3)
    twice = np.stack([lengths - 1, lengths], 1).ravel()
    want = expected(both, k, v, table.repeat(2, 0), twice, 0.3)
    assert (out.cpu().double() - want).norm() / want.norm() < tolerance(dtype)


# What is refused.


@plain
@pytest.mark.parametrize(
    "dims", [(8, 8), (16, 16), (64, 64), (80, 80), (96, 80), (128, 64), (128, 128), (192, 128), (192, 192), (256, 256)]
)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_every_usual_shape_is_taken(dims: tuple[int, int], dtype: torch.dtype) -> None:
    for page in (16, 32, 64, 128):
        for heads, kv_heads in ((32, 8), (7, 1), (15, 3), (5, 5), (64, 1)):
            assert unsupported(heads, kv_heads, *dims, page, dtype) is None


@plain
@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ((32, 8, 128, 128, 64, torch.float64), "float64"),
        ((32, 8, 128, 128, 48, BF16), "page_size is 48"),
        ((32, 8, 128, 128, 256, BF16), "page_size is 256"),
        ((32, 5, 128, 128, 64, BF16), "32 query heads .* 5 KV heads"),
        ((142, 1, 64, 64, 64, BF16), "142 query heads share a KV head"),
        ((32, 8, 576, 512, 64, BF16), "576 dimensions"),
        ((32, 8, 128, 264, 64, BF16), "264 dimensions"),
        ((32, 8, 100, 100, 64, BF16), "200 bytes"),
        ((32, 8, 64, 2, 64, FP32), "8 bytes"),
    ],
)
def test_what_is_refused_is_named(shape: tuple[Any, ...], named: str) -> None:
    reason = unsupported(*shape)
    assert reason is not None
    assert re.search(named, reason)
