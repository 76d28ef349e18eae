"""What a model's experts and products run in place of their own, during a pass whose numbers depend on no other row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from .fixed_experts import expert_forwards
from .fixed_products import FixedThreads, WideProducts, plain_products

Forward = Callable[..., Any]


class FixedForwards:
    """``restore`` may be called again and again: an interrupt may come in the midst of it.

    A product that is not found here runs in one thread.
    """

    def __init__(self, model: nn.Module, rows: int, threads: FixedThreads, wide: WideProducts | None = None) -> None:
        """wide: of passes with many rows, where there are some."""
        self._threads = threads
        self._wide = wide
        self._experts = expert_forwards(model, rows, threads)
        self._products = plain_products(model)
        self._before: list[tuple[nn.Module, Forward | None]] = []

    @contextmanager
    def applied(self) -> Iterator[None]:
        for module, forward in self._experts:
            self._put(module, forward)
        if self._threads.of_products > 1 or self._wide is not None:
            for module in self._products:
                forward = module.forward if self._wide is None else self._wide.forward_of(module)
                self._put(module, partial(self._threads.in_several, forward))
        try:
            yield
        finally:
            self.restore()

    def _put(self, module: nn.Module, forward: Forward) -> None:
        self._before.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    def restore(self) -> None:
        while self._before:
            module, before = self._before[-1]
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before
            self._before.pop()
