"""Attention in parts that end at fixed positions: right, and for each row the same bits in any surroundings."""

from __future__ import annotations

import random
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support_attention_cases import Variant, assert_near
from support_cases import SOME, up_to
from support_fixed_cases import GROW, FixedCase, attended, fixed_case, row_by_row, some_of
from support_kernels import DEVICE, dot_without_blas, kernel, plain  # noqa: F401

from hf_batchllm.kernels.lists.fixed_lists import PART, build_fixed
from hf_batchllm.kernels.lists.ranges import Readers, Units
from hf_batchllm.kernels.lists.work_lists import WorkLists
from hf_batchllm.kernels.reference import fixed_attention_torch
from hf_batchllm.kernels.triton import fixed_attention_triton

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
SMALL = Variant(4, 2, 16, 16, 16, F32)


def check(kernels: ModuleType, case: FixedCase, device: str, every_way: bool = True) -> None:
    tensors = case.tensors(device)
    base = attended(kernels, case, tensors)
    assert_near(base, case.reference(tensors.to(F64)), case.variant.dtype, "beside the reference")
    grown = attended(kernels, case, tensors, grown=GROW)
    assert_near(grown, case.reference(tensors.to(F64), GROW), case.variant.dtype, "after it has grown")
    assert torch.equal(attended(kernels, case, tensors, grown=GROW, after=0), base), "before it has grown"
    dice = random.Random(case.seed)
    ways: list[tuple[str, dict[str, Any]]] = [
        ("without sharing", {"shared": False}),
        ("no prefix pays", {"gates": (1e18, 1e18)}),
        ("one block for each part", {"share": 1}),
        ("one block for all parts", {"share": 10**6}),
        ("on a large card", {"multiprocessors": 1000}),
    ]
    for what, options in ways if every_way else ways[:1]:
        assert torch.equal(attended(kernels, case, tensors, **options), base), what
    if every_way:
        assert torch.equal(attended(kernels, case, tensors, grown=GROW, shared=False, share=1), grown)
    order = list(range(len(case.runs)))
    dice.shuffle(order)
    shuffled, moved, at = some_of(case, tensors, order)
    assert torch.equal(attended(kernels, shuffled, moved), base[at]), "in another order"
    for each in dice.sample(order, min(up_to(3) if every_way else 1, len(order))):
        alone, moved, at = some_of(case, tensors, [each])
        assert torch.equal(attended(kernels, alone, moved), base[at]), "a run alone"
        assert torch.equal(attended(kernels, row_by_row(alone, moved), moved), base[at]), "row by row"


PLAIN = [
    Variant(4, 2, 16, 16, 16, F64), Variant(6, 2, 24, 8, 16, F32, window=20), Variant(3, 3, 8, 8, 16, F32, softcap=2.0),
    Variant(16, 1, 16, 16, 16, F32, window=300, softcap=3.0), Variant(14, 2, 8, 8, 64, BF16, window=7),
    Variant(8, 1, 16, 16, 32, F32, sinks=True), Variant(10, 2, 8, 16, 16, F32, window=50, sinks=True),
]  # fmt: skip


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("seed", range(28))
def test_references(seed: int) -> None:
    check(fixed_attention_torch, fixed_case(seed, PLAIN[seed % len(PLAIN)], runs=8, most=400), "cpu")


@pytest.mark.some_cases
@kernel
@pytest.mark.usefixtures("dot_without_blas")
@pytest.mark.parametrize(
    "variant",
    [SMALL, replace(SMALL, window=300), replace(SMALL, dtype=F16, softcap=1.5, window=20), replace(SMALL, sinks=True)],
    ids=str,
)
def test_kernels(variant: Variant) -> None:
    check(fixed_attention_triton, fixed_case(5, variant, runs=4, most=2 * PART, chunks=8), DEVICE)


NATIVE = [
    Variant(32, 8, 128, 128), Variant(16, 8, 128, 128, dtype=F16), Variant(4, 1, 256, 256, window=512),
    Variant(64, 8, 64, 64, window=128, sinks=True), Variant(8, 4, 256, 256, softcap=50.0), Variant(14, 2, 64, 64),
    Variant(16, 2, 96, 96, 16), Variant(8, 8, 64, 64, dtype=F32), Variant(16, 1, 192, 128, 32),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("variant", NATIVE, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_on_a_gpu(seed: int, variant: Variant) -> None:
    case = fixed_case(seed, variant, runs=[6, 40][seed % 2], most=[300, 1500][seed // 2], chunks=[20, 200][seed % 2])
    check(fixed_attention_triton, case, DEVICE)


@pytest.mark.some_cases
@kernel
@pytest.mark.usefixtures("dot_without_blas")
@pytest.mark.parametrize(
    "variant",
    [Variant(7, 1, 16, 16, 16, F32), Variant(6, 2, 24, 16, 32, F32), Variant(3, 1, 16, 40, 64, F32)],
    ids=str,
)
def test_shapes(variant: Variant) -> None:
    # What cuts the work elsewhere knows nothing of these shapes, and is in the test above; each way takes seconds here.
    check(fixed_attention_triton, fixed_case(2, variant, runs=3, most=PART, chunks=5), DEVICE, every_way=not SOME)


def lists(prefix: int, rows: int, prompts: int, own: int = 250) -> WorkLists:
    """Of prompts with ``own`` tokens beside the prefix that they share, of which the last ``rows`` are computed."""
    page = 64
    pages = -(-own // page)
    units = Units(
        base=np.array([-1] + [0] * prompts),
        start=np.array([0] + [prefix] * prompts),
        page_begin=np.append(0, prefix // page + pages * np.arange(prompts + 1)),
        page=np.arange(prefix // page + pages * prompts),
    )
    at = np.arange(prompts)
    readers = Readers(at + 1, at * rows, np.full(prompts, rows), np.full(prompts, prefix + own))
    lengths = np.tile(np.arange(prefix + own - rows, prefix + own) + 1, prompts)
    return build_fixed(units, readers, lengths, kv_heads=8, group=2, page_size=page, multiprocessors=4)


def test_the_rest_of_a_prefix_is_read_once() -> None:
    """It ends within a part, with which its readers go on."""
    work = lists(prefix=1984, rows=1, prompts=16)
    assert len(work.entries) == 1984 // 64 + 16 * 4
    own = work.items[16]
    assert len(own) == 16 and (own[:, 7] >= 0).all() and (own[:, 5] < 0).all(), "each goes on, and writes the result"
    assert not work.merges
    shared = work.items[64]
    assert (shared[:, 7] < 0).all() and (shared[:, 5] >= 0).all(), "what others go on with is kept"


def test_long_prompts_read_alone() -> None:
    """They wait for products, and partial results of thousands of rows would take much memory."""
    work = lists(prefix=1984, rows=200, prompts=16)
    assert work.parts == 0 and not work.merges
    assert not (work.items[128][:, 5] >= 0).any()
