"""A model's products in several threads and all else in one, so that a row's numbers do not depend on its place.

Threads share functions such as the sigmoid in parts of any length, and the last few numbers of a part are computed by
other instructions. In one thread a pass has no such rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

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


def plain_products(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, (nn.Linear, Conv1D)) and _is_plain(each)]


def _is_plain(module: nn.Module) -> bool:
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)
