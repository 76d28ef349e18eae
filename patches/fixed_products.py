"""A model's products in several threads and all else in one, so that a row's numbers do not depend on its place.

Threads share functions such as the sigmoid in parts of any length, and the last few numbers of a part are computed by
other instructions. In one thread a pass has no such rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

Forward = Callable[..., Any]
T = TypeVar("T")


class FixedThreads:
    """``restore`` may be called again and again: an interrupt may come in the midst of it."""

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


class FixedProducts:
    """``restore`` may be called again and again, as above. A product that is not found here runs in one thread."""

    def __init__(self, model: nn.Module, threads: FixedThreads) -> None:
        self._threads = threads
        self._modules = [each for each in model.modules() if isinstance(each, (nn.Linear, Conv1D)) and _is_plain(each)]
        self._before: list[tuple[nn.Module, Forward | None]] = []

    @contextmanager
    def applied(self) -> Iterator[None]:
        if self._threads.of_products > 1:
            for module in self._modules:
                own = module.__dict__.get("forward")
                self._before.append((module, own))
                module.__dict__["forward"] = partial(self._threads.in_several, module.forward)
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        while self._before:
            module, before = self._before[-1]
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before
            self._before.pop()


def _is_plain(module: nn.Module) -> bool:
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)
