"""A stand-in for a device without float64, such as Apple's `mps`: tensors that say they are there, and are on the CPU.

Anything that puts float64 there fails, as it does on the real device. So does a computation with tensors of two places,
and a copy that does not wait for memory of the host.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

_LACKING = (torch.float64, torch.complex128)
_MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
# Their masks and indices may be on the host.
_INDEXING = (
    torch.Tensor.__getitem__,
    torch.Tensor.__setitem__,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
)
# What the tensor on the CPU is asked instead.
_ASKED_OF_HELD = (torch.Tensor.data_ptr, torch.Tensor.tolist, torch.Tensor._version.__get__)  # type: ignore[attr-defined]
_NO_DEVICE = ("not linked with support for", "An unexpected device type was provided")


class NoFloat64Error(TypeError):
    """As PyTorch's for `mps`."""


class There(torch.Tensor):
    """A tensor on the device. ``held``: the same numbers on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> There:
        if held.dtype in _LACKING:
            raise NoFloat64Error(f"{device} has no {held.dtype}")
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
            requires_grad=False,
        )
        made.held = held
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKED_OF_HELD:
            return _run(func, args, kwargs or {})
        if func is torch.Tensor.new_tensor:
            like, *numbers = args
            return torch.tensor(*numbers, **{"dtype": like.dtype, **(kwargs or {}), "device": "cpu"}).to(like.device)
        if func is torch.Tensor.as_subclass:  # to a plain tensor: it is as plain as it can be
            return args[0]
        if func is torch.Tensor.numpy:
            raise TypeError(f"can't convert {args[0].device} tensor to numpy. Use Tensor.cpu() first")
        try:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _NO_DEVICE):
                raise
            # Some functions make the device the current one before they do anything else.
            return _run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> There:
        return There(copy.deepcopy(self.held, memo), self.device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"There({self.held!r}, {self.device})"


class _Made(TorchDispatchMode):
    """Tensors that are made on the device, or brought there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.device)


class _MadeOfNumbers(TorchFunctionMode):
    """The same for functions that ask a device before they make a tensor."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device) == self.device:
            return func(*args, **{**kwargs, "device": "cpu"}).to(self.device)
        return func(*args, **kwargs)


@contextmanager
def device_without_float64(device: torch.device) -> Iterator[None]:
    """While the block runs, tensors can be made on the device and brought there."""
    with _Made(device), _MadeOfNumbers(device):
        yield


def brought(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of the model on the device."""
    made = copy.deepcopy(model)
    moved: dict[int, Any] = {}  # weights may be tied
    for module in made.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if id(weight) not in moved:
                    moved[id(weight)] = nn.Parameter(There(weight.detach(), device), requires_grad=False)
                module._parameters[name] = moved[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = There(buffer, device)
    return made


def _run(func: Any, args: Any, kwargs: dict[str, Any], ours: torch.device | None = None) -> Any:
    given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    there = [each for each in given if isinstance(each, There)]
    asked = kwargs.get("device")
    if ours is None and there:
        ours = there[0].device
    asked_there = asked is not None and ours is not None and torch.device(asked).type == ours.type
    if not there and not asked_there:
        return func(*args, **kwargs)
    assert ours is not None
    if func in _MOVES:
        _check_move(func, args, kwargs, ours)
    elif func not in _INDEXING:
        others = [each for each in given if not isinstance(each, There) and each.dim() and each.device.type == "cpu"]
        if there and others:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {ours} and cpu")
    known = {id(each.held): each for each in there}

    def inside(each: Any) -> Any:
        return each.held if isinstance(each, There) else each

    arguments = tree_map(inside, kwargs)
    if asked_there:
        arguments["device"] = torch.device("cpu")
    made = func(*tree_map(inside, args), **arguments)
    if asked is not None and not asked_there:  # brought away
        return made

    def outside(each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        if id(each) in known:
            return known[id(each)]  # written to in place
        if not isinstance(each, There) and any(each is other for other in given):
            return each  # a tensor of the CPU that was copied to
        return There(each, ours)

    return tree_map(outside, made)


def _check_move(func: Any, args: Any, kwargs: dict[str, Any], ours: torch.device) -> None:
    if func is _MOVES[1]:
        into, source = args[:2]
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        to, dtype = into.device, into.dtype
    else:
        source, waits = args[0], not kwargs.get("non_blocking", False)
        to, dtype = torch.device(kwargs.get("device") or source.device), kwargs.get("dtype") or source.dtype
    if to.type == source.device.type:
        return
    if dtype in _LACKING or source.dtype in _LACKING:
        # Where numbers are converted, before the copy or after it, is up to the device: nobody may rely on it.
        raise NoFloat64Error(f"a copy between {source.device} and {to}, from {source.dtype} to {dtype}")
    if not waits and not (source if to.type == ours.type else args[0]).is_pinned():
        raise AssertionError(f"a copy from {source.device} to {to} does not wait, and the host's memory is not pinned")
