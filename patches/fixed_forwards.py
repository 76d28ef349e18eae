"""What a model's experts and products run in place of their own, during a pass whose numbers depend on no other row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from .fixed_experts import expert_forwards
from .fixed_products import FixedThreads, WideProducts, plain_products

Forward = Callable[..., Any]


class ForwardsInPlace:
    """``restore`` may be called again and again: an interrupt may come in the midst of it."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, Forward | None]] = []

    @contextmanager
    def applied(self) -> Iterator[None]:
        try:
            for module, forward in self._forwards():
                self._before.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = forward
            yield
        finally:
            self.restore()

    def _forwards(self) -> Iterable[tuple[nn.Module, Forward]]:
        return ()

    def restore(self) -> None:
        while self._before:
            module, before = self._before[-1]
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before
            self._before.pop()


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
