"""The autocast that accelerate puts around a model's forward where a trainer asks for mixed precision."""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from .unmodified import code_home, is_class

_CONVERTS = "accelerate.utils.operations", "ConvertOutputsToFp32"
_DECORATED = "torch.amp.autocast_mode"


def autocasts_within(model: nn.Module) -> list[torch.autocast]:
    """The autocasts that the model's forward enters by itself, the outermost first."""
    found: list[torch.autocast] = []
    forward = model.__dict__.get("forward")
    while forward is not None and (apart := _taken_apart(forward)) is not None:
        forward, autocast = apart
        found += [] if autocast is None else [autocast]
    return found


def dtype_within(model: nn.Module, device: torch.device) -> torch.dtype | None:
    """The type of the autocast that the model's forward runs under, if it enters one; None where that is switched off.

    Of several it is the innermost that counts.
    """
    own = [each for each in autocasts_within(model) if each.device == device.type]
    return own[-1].fast_dtype if own and own[-1]._enabled else None


def past_autocast(forward: Any) -> Any:
    """The forward inside accelerate's, which gives the same but for the types of numbers."""
    while (found := _taken_apart(forward)) is not None:
        forward, _ = found
    return forward


def _taken_apart(forward: Any) -> tuple[Any, torch.autocast | None] | None:
    """What a forward of accelerate's calls, and the autocast that it does so under; None if it is not theirs."""
    function = getattr(forward, "__func__", forward)
    converts: Any = getattr(function, "__wrapped__", None)
    if converts is not None and is_class(type(converts), *_CONVERTS) and code_home(function) == _CONVERTS[0]:
        return _bound_as(forward, converts.model_forward), None
    if isinstance(function, FunctionType) and code_home(function) == _DECORATED:
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        autocast = [each for each in held if isinstance(each, torch.autocast)]
        called = [each for each in held if isinstance(each, FunctionType | MethodType)]
        if len(autocast) == len(called) == 1:
            return _bound_as(forward, called[0]), autocast[0]
    return None


def _bound_as(forward: Any, function: Any) -> Any:
    owner = getattr(forward, "__self__", None)
    return function if owner is None or isinstance(function, MethodType) else MethodType(function, owner)
