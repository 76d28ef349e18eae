"""Modules whose weights transformers has spread over several processes (tensor parallelism): what this process has.

transformers puts a forward around a module's own, which shares the work with the other processes. A module that gives
this process's part of the result, and talks to no other, may be left out like any other one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

_HOME = "transformers.distributed.tensor_parallel"
_OWN = "original_forward"  # what it calls that forward
# A forward around a module's own without a style: that of norms of heads, whose gradients alone are added up.
_SUMS_GRADIENTS = "adds up gradients"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a weight: all of it, unless it is sharded."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def is_rows_of_it(parameter: torch.Tensor) -> bool:
    """Whether it is sharded, and this process has some of its rows, or all of them."""
    part = local(parameter)
    if part is parameter or type(part) is not torch.Tensor:
        return False
    placements: Any = getattr(parameter, "placements", ())
    return all(each.is_replicate() or (type(each).__name__ == "Shard" and each.dim == 0) for each in placements)


def is_part_of_each(parameter: torch.Tensor) -> bool:
    """Whether it is sharded, and this process has a part of each of its matrices, as a plain tensor of its own."""
    part = local(parameter)
    return part is not parameter and type(part) is torch.Tensor and part.is_contiguous()


def has_sharded_forward(module: nn.Module) -> bool:
    """Whether its forward is one that transformers has put around that of its class."""
    return _style_of(module) is not None


def gives_its_part(module: nn.Module) -> bool:
    """Whether its forward talks to no other process: it gives what the class does with the weights that are here."""
    style = _style_of(module)
    if style is None or style is _SUMS_GRADIENTS:
        return style is not None
    layout = getattr(style, "output_layouts", None)
    colwise = type(style).__name__ == "ColwiseParallel" and style.use_local_output
    return bool(colwise and layout is not None and layout.is_shard())


def adds_up_rows(module: nn.Module) -> bool:
    """Whether it is a linear layer whose inputs are spread over the processes, and whose forward adds up the results.

    Its bias, which each process has, is added to the sum.
    """
    style = _style_of(module)
    if type(style).__name__ != "RowwiseParallel" or type(module) is not nn.Linear:
        return False
    takes, gives = style.input_layouts, style.output_layouts
    weight = module._parameters.get("weight")
    return (
        type(takes).__name__ == "Shard"
        and takes.dim == -1
        and gives.is_replicate()
        and set(module._parameters) == {"weight", "bias"}
        and weight is not None
        and local(weight) is not weight
        and type(local(weight)) is torch.Tensor
    )


def adds_up_experts(module: nn.Module) -> bool:
    """Whether each process computes a part of all experts, whose results its forward adds up."""
    return type(_style_of(module)).__name__ == "MoeExpertsParallel"


def around(module: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
    """The forward that transformers has put around the one of the module's class, around ``inner`` instead."""
    forward: Any = module.__dict__["forward"]
    names, cells = forward.__code__.co_freevars, forward.__closure__
    swapped = tuple(CellType(inner) if name == _OWN else cell for name, cell in zip(names, cells, strict=True))
    made = FunctionType(forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, swapped)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _style_of(module: nn.Module) -> Any:
    forward = module.__dict__.get("forward")
    if type(forward) is not FunctionType or (forward.__module__, forward.__name__) != (_HOME, "tp_forward"):
        return None
    cells = (cell.cell_contents for cell in forward.__closure__ or ())
    held = dict(zip(forward.__code__.co_freevars, cells, strict=True))
    own = held.get(_OWN)
    if getattr(own, "__func__", None) is not type(module).forward or getattr(own, "__self__", None) is not module:
        return None
    return held.get("self", _SUMS_GRADIENTS)
