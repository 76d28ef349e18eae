"""What a model's experts and products run in place of their own, during a pass whose numbers depend on no other row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from .fixed_experts import expert_forwards
from .fixed_products import FixedThreads, WideProducts, plain_products
from .swap import Place, Swap

Forward = Callable[..., Any]


class ForwardsInPlace(Swap):
    def places(self) -> Iterator[Place]:
        for module, forward in self._forwards():
            yield module.__dict__, "forward", forward

    def _forwards(self) -> Iterable[tuple[nn.Module, Forward]]:
        return ()


class FixedForwards(ForwardsInPlace):
    """A product that is not found here runs in one thread."""

    def __init__(self, model: nn.Module, rows: int, threads: FixedThreads, wide: WideProducts | None = None) -> None:
        """wide: of passes with many rows, where there are some."""
        super().__init__()
        self._threads = threads
        self._wide = wide
        self._experts = expert_forwards(model, rows, threads)
        self._products = plain_products(model)

    def _forwards(self) -> Iterator[tuple[nn.Module, Forward]]:
        yield from self._experts
        if self._threads.of_products > 1 or self._wide is not None:
            for module in self._products:
                forward = module.forward if self._wide is None else self._wide.forward_of(module)
                yield module, partial(self._threads.in_several, forward)


class Conv1DAsLinear(ForwardsInPlace):
    """GPT-2's products by the function that linear layers call: it is replaced where a single row needs another way."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._products = [
            (module, partial(_linear, module)) for module in plain_products(model) if isinstance(module, Conv1D)
        ]

    def _forwards(self) -> Iterable[tuple[nn.Module, Forward]]:
        return self._products


def _linear(module: Conv1D, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, module.weight.t(), module.bias)
