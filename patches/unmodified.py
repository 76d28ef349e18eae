"""Whether a module does what its class says and nothing else, so that something else may do it instead."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_COMPILED = "torch._dynamo.eval_frame", "OptimizedModule"
# By these transformers collects hidden states when it is asked to. Once installed they stay, and do nothing.
IDLE_HOOKS = "transformers.utils.output_capturing"


def is_class(cls: type, module: str, name: str) -> bool:
    return (cls.__module__, cls.__name__) == (module, name)


def is_function(function: Any, module: str, name: str) -> bool:
    """Whether it is the one that is written there, in no wrappers but transformers' own.

    By where its code is, as wrappers take over names and modules (``functools.wraps``).
    """
    while type(function) is FunctionType:
        home, wrapped = function.__globals__.get("__name__", ""), getattr(function, "__wrapped__", None)
        if wrapped is None:
            return (home, function.__qualname__) == (module, name)
        if not home.startswith("transformers."):
            return False
        function = wrapped
    return False


def is_compiled(module: nn.Module) -> bool:
    """By its ``compile()``, or as what ``torch.compile`` made of it."""
    return module._compiled_call_impl is not None or is_class(type(module), *_COMPILED)


def why_not_own(module: nn.Module | None, home: str, name: str) -> str | None:
    """What keeps ``module`` from doing what transformers' class ``name`` in ``home`` does, hooks left aside.

    In words that follow on the module's name.
    """
    cls = type(module)
    if not is_class(cls, home, name):
        return f"is a {cls.__name__} of {cls.__module__.partition('.')[0]}, not a plain {name}"
    assert module is not None
    if is_compiled(module):
        return "is compiled"
    if "_hf_hook" in module.__dict__:
        return "has a hook of accelerate's"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    if not is_function(cls.forward, home, f"{name}.forward"):
        return f"is a {name} whose forward has been replaced"
    return None


def why_not_plain(module: nn.Module | None, home: str, name: str) -> str | None:
    """The same for a module that is not to be called at all: nobody may be watching it."""
    why = why_not_own(module, home, name)
    if why is None and any(
        getattr(hook, "__module__", "") != IDLE_HOOKS for hooks in hook_dicts(module) for hook in hooks.values()
    ):
        return "has hooks"
    return why


def why_not_linear(module: nn.Module | None) -> str | None:
    why = why_not_plain(module, nn.Linear.__module__, "Linear")
    if why is None and (set(module._parameters) != {"weight", "bias"} or module.weight is None or module._buffers):
        return "computes its weight from others"
    return why


def hook_dicts(module: nn.Module) -> list[dict[int, Any]]:
    return [getattr(module, name) for name in _HOOKS]
