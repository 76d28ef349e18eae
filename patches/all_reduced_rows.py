"""Modules whose results all ranks add up: the product and the all-reduce in one, in place of what transformers calls.

transformers' own forward looks its weights up anew in each call and asks the process group for each all-reduce.
That takes the host longer than the device takes for a decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from .sharded_modules import local


class AllReduce(Protocol):
    """How ranks add up what each has: through their process group, or in memory that all of them reach."""

    made: int  # how many, that the process group does not know of

    def begin(self) -> None:
        """All ranks are about to run the model once."""

    def close(self) -> None:
        """Give back what they take, whoever still holds them."""

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' products: [tokens, in], [out, in] -> [tokens, out]."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks have. x may be overwritten."""


class GroupAllReduce:
    """Through a process group of PyTorch's."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._all_reduce: Callable[..., Any] = dist.all_reduce
        self.group = group
        self.made = 0

    def begin(self) -> None:
        pass

    def close(self) -> None:
        pass

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.total(functional.linear(x, weight))

    def total(self, x: torch.Tensor) -> torch.Tensor:
        self._all_reduce(x, group=self.group)
        return x


def all_reduced_forward(linear: nn.Module, all_reduce: AllReduce) -> Callable[..., torch.Tensor]:
    """The forward of a linear layer whose inputs are spread over the ranks."""
    parameters = linear._parameters

    def forward(input: torch.Tensor) -> torch.Tensor:  # [..., this rank's inputs]
        weight, bias = parameters["weight"], parameters["bias"]
        assert weight is not None
        made = all_reduce.product(input.reshape(-1, input.shape[-1]), local(weight))
        if bias is not None:
            made += local(bias)
        return made.view(*input.shape[:-1], made.shape[-1])

    return forward
