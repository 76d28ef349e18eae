"""Modules that their user compiled (``torch.compile``) run as they were written, for as long as a step takes.

A step differs from the one before in its number of tokens, and what it runs is this library's code as well: Dynamo
would compile it anew in nearly every step. Only the model's own modules are touched, and no state of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from inspect import getattr_static, unwrap
from types import FunctionType, MethodType
from typing import Any, cast

from torch import nn

from .autocast_around import past_autocast
from .sharded_modules import has_sharded_forward
from .swap import Place, Swap
from .unmodified import code_home, is_compiled

_COMPILED_FROM = "_torchdynamo_orig_callable"
_COMPILED_CALL = "_compiled_call_impl"
_WRAPPER = "OptimizedModule"
# TRL's trainers put a forward around the model's, which only calls that one unless it is asked for a loss.
_TRAINERS = ("trl.", "_fused_forward")


class Uncompiled(Swap):
    """``modules``: all of a model's."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self._forwards = list(_original_forwards(modules))

    def __bool__(self) -> bool:
        """Whether anything is compiled."""
        return bool(self._forwards)

    def places(self) -> list[Place]:
        return self._forwards


def every_module(model: nn.Module) -> list[nn.Module]:
    """Gives all of ``modules()``, several times faster, in another order. One that stands in two places comes twice."""
    found: list[nn.Module] = []
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            found.append(module)
            if children := module._modules:
                waiting.extend(children.values())
    return found


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The ``forward`` set on a module itself, past ``torch.compile`` and trainers; None if it is that of its class.

    One that transformers puts around it where weights are sharded is no other: all ranks together do what it says.
    """
    forward = module.__dict__.get("forward")
    if forward is None or has_sharded_forward(module):
        return None
    original: Any = past_trainers(_uncompiled(forward))
    if is_compiled(module):
        return None
    if getattr(original, "__self__", None) is module:
        of_class = _uncompiled(type(module).forward)
        # When accelerate takes its own off a model, it takes off what transformers has around the class's, too.
        if original.__func__ in (of_class, unwrap(of_class)):
            return None
    return cast(Callable[..., Any], original)


def _original_forwards(modules: Sequence[nn.Module]) -> Iterator[Place]:
    classes: dict[type, tuple[Any, bool]] = {}  # what the class's `forward` was compiled from; whether to look closer
    for module in modules:
        cls, held = type(module), module.__dict__
        if cls not in classes:
            # Not `cls.forward`: that of a class made by torch.jit only answers to its modules.
            compiled = getattr(getattr_static(cls, "forward", None), "__dict__", {}).get(_COMPILED_FROM)
            classes[cls] = compiled, compiled is not None or cls.__name__ == _WRAPPER
        of_class, looked_at = classes[cls]
        if _COMPILED_CALL in held and held[_COMPILED_CALL] is not None:
            yield held, _COMPILED_CALL, None
        if not looked_at and "forward" not in held and "_orig_mod" not in held:
            continue
        forward = held.get("forward")
        if isinstance(original := held.get("_orig_mod"), nn.Module) or (original := _inner(module)) is not None:
            yield held, "forward", original.__call__
        elif forward is not None:
            if hasattr(forward, _COMPILED_FROM):
                yield held, "forward", _uncompiled(forward)
        elif of_class is not None:
            yield held, "forward", MethodType(_uncompiled(cls.forward), module)


def _inner(module: nn.Module) -> nn.Module | None:
    """What ``torch.compile(module)`` wrapped."""
    return module._modules.get("_orig_mod") if type(module).__name__ == _WRAPPER else None


def past_trainers(forward: Any) -> Any:
    """What a trainer's forward calls."""
    forward = _uncompiled(past_autocast(forward))
    while getattr(getattr(forward, "__code__", None), "co_name", "") == _TRAINERS[1]:
        held = [cell.cell_contents for cell in forward.__closure__ or ()]
        called = [each for each in held if isinstance(each, MethodType | FunctionType)]
        if not code_home(forward).startswith(_TRAINERS[0]) or len(called) != 1:
            break
        forward = _uncompiled(past_autocast(_uncompiled(called[0])))
    return forward


def _uncompiled(function: Any) -> Any:
    while (original := getattr(function, _COMPILED_FROM, None)) is not None:
        function = original
    return function
