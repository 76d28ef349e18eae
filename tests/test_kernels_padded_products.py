"""Products computed with more rows than they have, where that is faster: which they are, and that no answer changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_batchllm.kernels import narrow_products_torch
from hf_batchllm.patches.narrow_products import row_by_row_linear
from hf_batchllm.patches.padded_products import MOST, SIZES, PaddedRows, faster_sizes, seconds_on_a_gpu

# As on an H200 for the last product of an 8B model's layers: it is slow with up to 16 rows.
SLOW_AT_FIRST = {size: 320e-6 if size <= 16 else (33e-6 + size * 50e-9) for size in SIZES}
NARROW = narrow_products_torch.narrow_product


class Clock:
    """How long a product takes with so many rows, and how often that was asked."""

    def __init__(self, seconds: dict[int, float] | None) -> None:
        self.seconds, self.asked, self.rows = seconds, 0, 0

    def __call__(self, run: Callable[[], Any], device: torch.device) -> float | None:
        self.asked += 1
        if self.seconds is None:
            return None
        run()
        return self.seconds[self.rows]

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.rows = x.numel() // max(1, x.shape[-1])
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        return exact.to(x.dtype)  # a row has the same bits among any others


def test_which_sizes_are_taken() -> None:
    flat = [50e-6 + size * 10e-9 for size in SIZES]
    assert faster_sizes(flat) == SIZES
    assert faster_sizes([SLOW_AT_FIRST[size] for size in SIZES]) == (24, 24, 24, 24, *SIZES[4:])
    slow_to_64 = [75e-6 if size <= 64 else 8e-6 for size in SIZES]
    assert faster_sizes(slow_to_64) == (96,) * 8 + (96, 128)
    assert faster_sizes([4e-6, *[2e-6] * 9]) == SIZES, "copying the rows takes longer than that saves"
    assert faster_sizes([*[50e-6] * 9, 45e-6]) == SIZES, "and this may be noise"


@torch.no_grad()
def test_a_slow_product_has_more_rows() -> None:
    clock = Clock(SLOW_AT_FIRST)
    linear = row_by_row_linear(clock.product, NARROW, "cpu", PaddedRows(clock))
    weight, bias = torch.randn(256, 16, dtype=torch.float16), torch.randn(256, dtype=torch.float16)
    x = torch.randn(200, 16, dtype=torch.float16)
    for also in (None, bias):
        every, computed = torch.nn.functional.linear(x, weight, also), []
        for rows in (1, 2, 7, 16, 17, 24, 25, 100, 128, 129, 200):
            found = linear(x[:rows], weight, also)
            computed.append(clock.rows)
            assert found.is_contiguous()
            torch.testing.assert_close(found, every[:rows], rtol=2e-3, atol=2e-3)
        assert computed == [24, 24, 24, 24, 17, 24, 25, 100, 128, 129, 200]
    assert clock.asked == 2 * len(SIZES), "once for each kind of product"
    assert linear(x[:6].view(2, 3, 16), weight).shape == (2, 3, 256) and clock.rows == 24
    assert linear(x[0], weight).shape == (256,) and clock.rows == 24
    assert linear(x[:0], weight).shape == (0, 256) and clock.rows == 0
    linear(x[:4], torch.randn(16, 256, dtype=torch.float16).t())
    assert clock.asked == 3 * len(SIZES), "a weight that lies the other way round is another kind"
    with torch.enable_grad():
        linear(x[:4], weight)
    assert clock.rows == 4, "what may take part in training"


@torch.no_grad()
def test_what_cannot_be_measured_now_is_measured_later() -> None:
    clock = Clock(None)  # while a graph is captured
    linear = row_by_row_linear(clock.product, NARROW, "cpu", PaddedRows(clock))
    x, weight = torch.randn(4, 16, dtype=torch.float16), torch.randn(256, 16, dtype=torch.float16)
    linear(x, weight)
    assert clock.rows == 4
    linear(x[:1], weight)
    assert clock.rows == 2, "a single row is never alone"
    clock.seconds = SLOW_AT_FIRST
    linear(x, weight)
    assert clock.rows == 24


@torch.no_grad()
def test_what_is_not_a_plain_product_is_the_librarys() -> None:
    clock = Clock(SLOW_AT_FIRST)
    linear = row_by_row_linear(torch.nn.functional.linear, NARROW, "cpu", PaddedRows(clock))
    x, weight = torch.ones(4, 16, dtype=torch.float16), torch.ones(256, 16, dtype=torch.float16)
    linear(x, weight.as_subclass(type("Quantised", (torch.Tensor,), {})))
    wholes = x.to(torch.int8), weight.to(torch.int8)
    torch.testing.assert_close(linear(*wholes), torch.nn.functional.linear(*wholes))
    assert not clock.asked
    for wrong in ((x, weight.double()), (x.int(), weight), (x[:, :8], weight), (x, weight, torch.ones(3))):
        with pytest.raises(RuntimeError) as theirs:
            torch.nn.functional.linear(*wrong)
        with pytest.raises(RuntimeError) as ours:
            linear(*wrong)
        assert str(ours.value).split("(")[0] == str(theirs.value).split("(")[0]


@torch.no_grad()
def test_where_bits_differ_nothing_is_padded() -> None:
    """So the trial of the model sees it."""
    clock = Clock(SLOW_AT_FIRST)

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        made = clock.product(x, weight, bias)
        return made if clock.rows != 48 else made + 1

    linear = row_by_row_linear(product, NARROW, "cpu", PaddedRows(clock))
    x, weight = torch.randn(4, 16, dtype=torch.float16), torch.randn(256, 16, dtype=torch.float16)
    linear(x, weight)
    assert clock.rows == 4
    linear(x[:1], weight)
    assert clock.rows == 2


@torch.no_grad()
def test_measuring_draws_no_noise_of_the_callers() -> None:
    clock = Clock(SLOW_AT_FIRST)
    before = torch.get_rng_state()
    x, weight = torch.ones(4, 16, dtype=torch.float16), torch.ones(256, 16, dtype=torch.float16)
    row_by_row_linear(clock.product, NARROW, "cpu", PaddedRows(clock))(x, weight)
    assert clock.asked and torch.equal(before, torch.get_rng_state())


@pytest.mark.gpu
@torch.no_grad()
def test_measuring_on_a_gpu() -> None:
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    few, many = weight[:1], weight.repeat(8, 1)
    for x in (few, many):
        torch.nn.functional.linear(x, weight)
    short, long = (seconds_on_a_gpu(lambda x=x: torch.nn.functional.linear(x, weight), x.device) for x in (few, many))
    assert short is not None and long is not None and 0 < short < long < 0.1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        none = seconds_on_a_gpu(lambda: torch.nn.functional.linear(few, weight), few.device)
        made = torch.nn.functional.linear(many, weight)
    assert none is None
    graph.replay()
    torch.testing.assert_close(made, torch.nn.functional.linear(many, weight))


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize(("columns", "depth"), [(4096, 14336), (1024, 3072), (4096, 4096)])
def test_padded_rows_have_the_same_bits_on_a_gpu(columns: int, depth: int) -> None:
    from hf_batchllm.model.unsplit_products import UnsplitProducts

    weight = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(3 * MOST, depth, device="cuda", dtype=torch.bfloat16)
    with UnsplitProducts().applied():
        every = torch.nn.functional.linear(x, weight)
        for rows in (1, *SIZES, 17, 33, 100, 2 * MOST):
            assert torch.equal(torch.nn.functional.linear(x[:rows], weight), every[:rows]), rows
