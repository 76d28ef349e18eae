"""Products computed with more rows than they have, where that is faster: which they are, and that no answer changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_batchllm.kernels.reference import narrow_products_torch
from hf_batchllm.model.unsplit_products import unsplit
from hf_batchllm.patches.narrow_products import row_by_row_linear
from hf_batchllm.patches.padded_products import MOST, SIZES, PaddedRows, faster_sizes, seconds_on_a_gpu

# As on an H200 for the last product of an 8B model's layers: it is slow with up to 16 rows.
SLOW_AT_FIRST = {size: 320e-6 if size <= 16 else (33e-6 + size * 50e-9) for size in SIZES}
FLOAT16 = torch.float16
Product = Callable[..., torch.Tensor]


class Library:
    """Products whose rows have the same bits among any others. ``rows``: what the latest one was given."""

    def __init__(self) -> None:
        self.asked, self.rows, self.may_measure, self.runs_a_step = 0, 0, True, True

    def seconds(self, run: Callable[[], Any], device: torch.device) -> float:
        self.asked += 1
        run()
        return SLOW_AT_FIRST[self.rows]

    def linear(self, product: Product | None = None) -> Product:
        padded = PaddedRows(self.seconds, lambda: self.may_measure)
        narrow = narrow_products_torch.narrow_product
        return row_by_row_linear(product or self.product, narrow, lambda: self.runs_a_step, "cpu", padded)

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.rows = x.numel() // max(1, x.shape[-1])
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        return exact.to(x.dtype)


def said(product: Product, given: tuple[torch.Tensor, ...]) -> str | None:
    """The error of a product, if it is one."""
    try:
        product(*given)
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return None


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
    library = Library()
    linear = library.linear()
    weight, bias, x = (torch.randn(shape, dtype=FLOAT16) for shape in ((256, 16), (256,), (200, 16)))
    for also in (None, bias):
        every, computed = torch.nn.functional.linear(x, weight, also), []
        for rows in (1, 2, 7, 16, 17, 24, 25, 100, 128, 129, 200):
            found = linear(x[:rows], weight, also)
            computed.append(library.rows)
            assert found.is_contiguous()
            torch.testing.assert_close(found, every[:rows], rtol=2e-3, atol=2e-3)
        assert computed == [24, 24, 24, 24, 17, 24, 25, 100, 128, 129, 200]
    once = library.asked // 2
    assert linear(x[:6].view(2, 3, 16), weight).shape == (2, 3, 256) and library.rows == 24
    assert linear(x[0], weight).shape == (256,) and library.rows == 24
    assert linear(x[:0], weight).shape == (0, 256) and library.rows == 0
    assert library.asked == 2 * once, "each kind of product is measured once"
    linear(x[:4], torch.randn(16, 256, dtype=FLOAT16).t())
    assert library.asked == 3 * once, "a weight that lies the other way round is another kind"
    with torch.enable_grad():
        linear(x[:4], weight)
    assert library.rows == 4, "what may take part in training"


@pytest.mark.parametrize("why_not", ["may_measure", "runs_a_step"])
@torch.no_grad()
def test_what_cannot_be_measured_now_is_measured_later(why_not: str) -> None:
    library = Library()
    linear, before = library.linear(), torch.get_rng_state()
    x, weight = torch.ones(4, 16, dtype=FLOAT16), torch.ones(256, 16, dtype=FLOAT16)
    setattr(library, why_not, False)  # a graph is captured, or this is another thread's product
    linear(x, weight)
    assert library.rows == 4
    linear(x[:1], weight)
    assert library.rows == 2, "a single row is never alone"
    assert not library.asked
    setattr(library, why_not, True)
    linear(x, weight)
    assert library.rows == 24 and library.asked
    assert torch.equal(before, torch.get_rng_state()), "no draw of the caller's depends on this"


@torch.no_grad()
def test_what_is_not_a_plain_product_is_the_librarys() -> None:
    library = Library()
    linear = library.linear(torch.nn.functional.linear)
    x, weight = torch.ones(4, 16, dtype=FLOAT16), torch.ones(256, 16, dtype=FLOAT16)
    quantised = weight.as_subclass(type("Quantised", (torch.Tensor,), {}))
    linear(x, quantised)
    alike = ((x.to(torch.int8), weight.to(torch.int8)), (x.float().to_sparse(), weight.float()))
    for given in alike:
        torch.testing.assert_close(linear(*given), torch.nn.functional.linear(*given))
    for wrong in (
        (x, weight.double()), (x.int(), weight), (x[:, :8], weight), (x, weight, torch.ones(3, dtype=FLOAT16)),
        (x, weight.to_sparse_csr()), (x.to(torch.float8_e4m3fn), weight),
    ):  # fmt: skip
        assert said(linear, wrong) == said(torch.nn.functional.linear, wrong)
    assert not library.asked
    ours = library.linear()
    ours(x[:1], quantised)
    assert library.rows == 2, "its products may be a library's in the end"


@torch.no_grad()
def test_each_type_under_autocast_is_a_kind() -> None:
    library = Library()
    linear, x, weight = library.linear(), torch.ones(4, 16, dtype=FLOAT16), torch.ones(256, 16, dtype=FLOAT16)
    asked = set()
    for dtype in (torch.bfloat16, FLOAT16):
        with torch.autocast("cpu", dtype=dtype):
            linear(x, weight)
            asked.add(library.asked)
    linear(x, weight)
    assert len({*asked, library.asked}) == 3


@torch.no_grad()
def test_where_bits_differ_nothing_is_padded() -> None:
    """So the trial of the model sees it."""
    for odd in (48, 33):
        library = Library()

        def product(*given: torch.Tensor, library: Library = library, odd: int = odd) -> torch.Tensor:
            made = library.product(*given[:2])
            return made if library.rows != odd else made + 1

        linear = library.linear(product)
        x, weight = torch.randn(4, 16, dtype=FLOAT16), torch.randn(256, 16, dtype=FLOAT16)
        linear(x, weight)
        assert library.rows == 4
        linear(x[:1], weight)
        assert library.rows == 2


@torch.no_grad()
def test_where_memory_does_not_suffice_to_measure() -> None:
    library = Library()

    def product(*given: torch.Tensor) -> torch.Tensor:
        if len(given[0]) > 90:
            raise torch.OutOfMemoryError
        return library.product(*given[:2])

    linear = library.linear(product)
    for rows in (4, 1, 4):
        assert linear(torch.ones(rows, 16, dtype=FLOAT16), torch.ones(256, 16, dtype=FLOAT16)).shape == (rows, 256)
    assert library.rows == 4


@torch.no_grad()
def test_another_threads_compiled_products_stay_whole() -> None:
    library = Library()
    linear = library.linear(torch.nn.functional.linear)
    compiled = torch.compile(lambda x, weight: linear(x, weight), fullgraph=True, backend="eager")
    x, weight = torch.ones(4, 16, dtype=FLOAT16), torch.ones(256, 16, dtype=FLOAT16)
    torch.testing.assert_close(compiled(x, weight), torch.nn.functional.linear(x, weight))


def test_whose_products_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_batchllm.model import unsplit_products

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda *library: torch._C._BlasBackend.Cublaslt)
    found: list[bool] = []
    with unsplit():
        found.append(unsplit_products._runs_a_step())
        other = threading.Thread(target=lambda: found.append(unsplit_products._runs_a_step()))
        other.start()
        other.join()
    assert [*found, unsplit_products._runs_a_step()] == [True, False, False]


@pytest.mark.gpu
@torch.no_grad()
def test_measuring_on_a_gpu() -> None:
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    few, many = weight[:1], weight.repeat(8, 1)
    for x in (few, many):
        torch.nn.functional.linear(x, weight)
    short, long = (seconds_on_a_gpu(lambda x=x: torch.nn.functional.linear(x, weight), x.device) for x in (few, many))
    assert 0 < short < long < 0.1


@pytest.mark.gpu
@torch.no_grad()
def test_a_kind_that_a_capture_meets_first_on_a_gpu() -> None:
    weight = torch.randn(1032, 4104, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(300, 4104, device="cuda", dtype=torch.bfloat16)
    with unsplit():
        every = torch.nn.functional.linear(x, weight)  # its rows are too many to be measured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [torch.nn.functional.linear(x[:rows], weight) for rows in (1, 4)]
        graph.replay()
        for made in (*captured, torch.nn.functional.linear(x[:4], weight)):
            assert torch.equal(made, every[: len(made)])


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize(("columns", "depth"), [(4096, 14336), (1024, 3072), (4096, 4096)])
def test_padded_rows_have_the_same_bits_on_a_gpu(columns: int, depth: int) -> None:
    weight = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(3 * MOST, depth, device="cuda", dtype=torch.bfloat16)
    with unsplit():
        every = torch.nn.functional.linear(x, weight)
        for rows in (1, *SIZES, 17, 33, 100, 2 * MOST):
            assert torch.equal(torch.nn.functional.linear(x[:rows], weight), every[:rows]), rows
