"""Products with few columns, or an odd number of them: right, and a row has the same bits among any others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support_kernels import DEVICE, GPU, dot_without_blas, draw, kernel, plain  # noqa: F401

from hf_batchllm.kernels.reference import narrow_products_torch
from hf_batchllm.kernels.triton import narrow_products_triton
from hf_batchllm.patches.narrow_products import is_narrow, row_by_row_linear
from hf_batchllm.patches.padded_products import PaddedRows, seconds_on_a_gpu

FLOAT32, FLOAT16 = torch.float32, torch.float16
NOT_NOW = PaddedRows(seconds_on_a_gpu, lambda: False)  # nothing can be measured
NEAR = {FLOAT32: 1e-5, FLOAT16: 2e-3, torch.bfloat16: 1e-2}


def in_a_step() -> bool:
    return True


@kernel
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, *([torch.bfloat16] if GPU else [])], ids=str)
@pytest.mark.parametrize(("columns", "depth"), [(1, 5), (8, 256), (64, 64), (101, 75), (130, 33)])
def test_beside_the_reference(columns: int, depth: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(columns)
    weight, bias = draw(rng, columns, depth, dtype=dtype).to(DEVICE), draw(rng, columns, dtype=dtype).to(DEVICE)
    x = draw(rng, 300, depth, dtype=dtype).to(DEVICE)
    for given in (x, x[:1], x[:33], x[5:45], x[:0], torch.cat([x, x], dim=1)[:40, :depth]):
        for also in (None, bias):
            made = narrow_products_triton.narrow_product(given, weight, also)
            expected = narrow_products_torch.narrow_product(given, weight, also)
            assert made.shape == expected.shape and made.dtype == dtype
            error = (made.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9)
            assert error < NEAR[dtype]
    transposed = weight.T.contiguous().T
    assert torch.equal(
        narrow_products_triton.narrow_product(x[:9], transposed), narrow_products_triton.narrow_product(x[:9], weight)
    )


@kernel
@pytest.mark.usefixtures("dot_without_blas")
@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32], ids=str)
def test_rows_have_the_same_bits_among_any_others(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    for columns, depth in ((8, 4096 if GPU else 160), (101, 75)):
        weight, x = draw(rng, columns, depth, dtype=dtype).to(DEVICE), draw(rng, 150, depth, dtype=dtype).to(DEVICE)
        every = narrow_products_triton.narrow_product(x, weight)
        for begin, end in ((0, 1), (7, 9), (30, 63), (149, 150), (1, 150)):
            assert torch.equal(narrow_products_triton.narrow_product(x[begin:end], weight), every[begin:end])


@plain
@pytest.mark.parametrize(
    ("shape", "dtype", "narrow"),
    [
        ((128, 2048), FLOAT16, True), ((256, 2048), FLOAT16, False), ((50257, 768), FLOAT16, True),
        ((151936, 1024), torch.bfloat16, False), ((4096, 1001), torch.bfloat16, True), ((4096, 4096), FLOAT32, True),
    ],
)  # fmt: skip
def test_which_products_these_are(shape: tuple[int, int], dtype: torch.dtype, narrow: bool) -> None:
    assert is_narrow(torch.empty(shape, dtype=dtype, device="meta")) == narrow


@plain
def test_what_is_left_to_the_library() -> None:
    seen: list[tuple[int, ...]] = []

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return narrow_products_torch.narrow_product(x, weight, bias)

    own = torch.nn.functional.linear
    linear = row_by_row_linear(own, product, in_a_step, "cpu", NOT_NOW)
    # A graph of a model is replayed as long as its functions stay.
    assert linear is row_by_row_linear(own, product, in_a_step, "cpu", NOT_NOW)
    x, weight, bias = torch.randn(2, 5, 6), torch.randn(3, 6), torch.randn(3)
    for given in ({"input": x}, {"input": x[0], "bias": bias}, {"input": x[0, 0], "bias": bias}, {"input": x[:0]}):
        torch.testing.assert_close(linear(weight=weight, **given), own(weight=weight, **given))
    assert seen == [(10, 6), (5, 6), (1, 6), (0, 6)]
    seen.clear()
    trained = weight.clone().requires_grad_()
    assert linear(x, trained).requires_grad and linear(x, weight, bias.clone().requires_grad_()).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    linear(x.double(), weight.double())
    linear(x, weight.as_subclass(type("Quantised", (torch.Tensor,), {})))
    linear(torch.randn(4, 0), torch.randn(3, 0))
    for wrong in ((x, torch.randn(3, 8)), (x, weight, torch.randn(2)), (x, weight.double())):
        with pytest.raises(RuntimeError):
            linear(*wrong)
    row_by_row_linear(own, product, in_a_step)(x, weight)  # of another kind of device
    assert not seen
    with torch.no_grad():
        linear(x, trained)
    assert seen == [(10, 6)]


@plain
def test_a_single_row_is_computed_with_another() -> None:
    seen: list[tuple[int, ...]] = []

    def own(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return torch.nn.functional.linear(x, weight, bias)

    linear = row_by_row_linear(own, narrow_products_torch.narrow_product, in_a_step, "cpu", NOT_NOW)
    weight, bias = torch.randn(256, 16, dtype=FLOAT16), torch.randn(256, dtype=FLOAT16)
    x = torch.randn(2, 3, 16, dtype=FLOAT16)
    with torch.no_grad():
        for given in (x, x[0], x[:0], x[:1, :1], x[0, :1], x[0, 0], x.transpose(0, 1)[:1, :1]):
            for also in (None, bias):
                expected = torch.nn.functional.linear(given, weight, also)
                torch.testing.assert_close(linear(given, weight, also), expected, rtol=2e-3, atol=2e-3)
        assert seen == [shape for shape in ((2, 3, 16), (3, 16), (0, 3, 16), *[(2, 16)] * 4) for _ in range(2)]
        seen.clear()
        with pytest.raises(RuntimeError):
            linear(x[:1, :1].view(4, 4), weight)  # as many numbers, and no row of this weight
        for wrong in ((x[0, 0, 0], weight[:, :1]), (x[0, 0], weight[0, 0])):
            with pytest.raises(RuntimeError):
                torch.nn.functional.linear(*wrong)
            with pytest.raises(RuntimeError):
                linear(*wrong)
        assert linear(x[..., :0], weight[:, :0]).shape == (2, 3, 256)
        seen.clear()
    linear(x[0, 0], weight)  # what may take part in training
    row_by_row_linear(own, narrow_products_torch.narrow_product, in_a_step)(x[0, 0], weight)  # another kind of device
    assert seen == [(16,), (16,)]
