"""A model's products in several threads and all else in one, so that a row's numbers do not depend on its place.

Threads share functions such as the sigmoid in parts of any length, and the last few numbers of a part are computed by
other instructions. In one thread a pass has no such rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .uncompiled import every_module

T = TypeVar("T")
_DRAWS = 3  # in float32 a product that differs does so in each


class FixedThreads:
    def __init__(self) -> None:
        self._before: int | None = None  # during a step, how many there were
        self.of_products = 1  # a power of two: products of a pass are cut evenly

    def begin(self) -> None:
        """One thread, until ``restore``."""
        before = torch.get_num_threads()
        self.of_products = 1 << (before.bit_length() - 1)
        self._before = before
        torch.set_num_threads(1)

    def in_several(self, function: Callable[..., T], *given: Any) -> T:
        """Products, and what else is the same in any number of threads."""
        torch.set_num_threads(self.of_products)
        try:
            return function(*given)
        finally:
            torch.set_num_threads(1)

    def restore(self) -> None:
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None


class WideProducts:
    """Products in passes of many rows: whole where that gives a row the same bits, else in pieces of a narrow pass.

    kinds: of products that were tried, and give the same bits.
    """

    def __init__(self, rows: int, wide_rows: int, kinds: Collection[object]) -> None:
        self.rows, self.wide_rows = rows, wide_rows
        self._kinds = frozenset(kinds)

    def forward_of(self, product: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return partial(self._forward, product.forward, kind_of(product) in self._kinds)

    def _forward(self, forward: Callable[[torch.Tensor], torch.Tensor], whole: bool, x: torch.Tensor) -> torch.Tensor:
        if rows_of_pass(x) <= self.rows or (whole and x.numel() // x.shape[-1] == self.wide_rows):
            return forward(x)
        return piece_by_piece(forward, self.rows, x)


def rows_of_pass(x: torch.Tensor) -> int:
    """x: [1, rows, ..., width] or [rows, width]."""
    return x.shape[_axis(x)]


def piece_by_piece(forward: Callable[[torch.Tensor], torch.Tensor], rows: int, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([forward(piece) for piece in x.split(rows, dim=_axis(x))], dim=_axis(x))


def _axis(x: torch.Tensor) -> int:
    return 1 if x.ndim > 2 else 0


def kind_of(product: nn.Module) -> object:
    """Which way BLAS goes is a matter of shapes."""
    weight, bias = product.weight, product.bias
    assert isinstance(weight, torch.Tensor)
    return type(product), weight.shape, weight.stride(), weight.dtype, weight.device, bias is None


def kinds_that_may_be_wide(model: nn.Module, rows: int, wide_rows: int, threads: FixedThreads) -> set[object]:
    """Kinds of products that give the same bits in one go and in pieces of so many rows, with the threads there are.

    In half precision products of other shapes differ in a few numbers of a million: no trial would find them surely.
    """
    products = {kind_of(product): product for product in plain_products(model)}
    made = torch.Generator().manual_seed(5)
    found = set()
    for kind, product in products.items():
        weight = product.weight
        assert isinstance(weight, torch.Tensor)
        width = weight.shape[0 if isinstance(product, Conv1D) else 1]
        sizes = _DRAWS, 1, wide_rows, width
        draws = torch.randn(sizes, generator=made, dtype=torch.float32, device="cpu").to(weight)
        if weight.dtype.itemsize >= 4 and all(_is_the_same(product, rows, x, threads) for x in draws):
            found.add(kind)
    return found


def _is_the_same(product: nn.Module, rows: int, x: torch.Tensor, threads: FixedThreads) -> bool:
    pieces = threads.in_several(piece_by_piece, product.forward, rows, x)
    return torch.equal(threads.in_several(product.forward, x), pieces)


def plain_products(model: nn.Module) -> list[nn.Module]:
    modules = dict.fromkeys(every_module(model))  # faster than ``modules()``
    return [each for each in modules if isinstance(each, (nn.Linear, Conv1D)) and _is_plain(each)]


def _is_plain(module: nn.Module) -> bool:
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)
