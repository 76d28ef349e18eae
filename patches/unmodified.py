"""Whether a module does exactly what its class says, so that other code may take its place."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import nn

from .sharded_modules import gives_its_part, has_sharded_forward

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_COMPILED = "torch._dynamo.eval_frame", "OptimizedModule"
# The module of transformers' hooks that collect hidden states on request. Once installed they stay, and do nothing.
_IDLE_HOOKS = "transformers.utils.output_capturing"
# Put on embeddings for gradient checkpointing and adapters: they do nothing where no gradients are taken.
_FOR_GRADIENTS = ("make_inputs_require_grads", "make_inputs_require_grad")
_FROM = ("transformers.", "peft.")


def is_class(cls: type, module: str, name: str) -> bool:
    return (cls.__module__, cls.__name__) == (module, name)


def is_function(function: Any, module: str, name: str) -> bool:
    """Whether it is the function ``name`` written in ``module``, wrapped at most by transformers itself.

    Decided by where its code stands: wrappers copy names and modules (``functools.wraps``).
    """
    while type(function) is FunctionType:
        home, wrapped = function.__globals__.get("__name__", ""), getattr(function, "__wrapped__", None)
        if wrapped is None:
            return (home, function.__qualname__) == (module, name)
        if not home.startswith("transformers."):
            return False
        function = wrapped
    return False


def code_home(function: Any) -> str:
    """The Python module in which a function, or a bound method, was written."""
    function = getattr(function, "__func__", function)
    home: str = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or ""
    return home


def is_compiled(module: nn.Module) -> bool:
    """By its own ``compile()``, or wrapped by ``torch.compile``."""
    return module._compiled_call_impl is not None or is_class(type(module), *_COMPILED)


def why_not_own(module: nn.Module | None, home: str, name: str) -> str | None:
    """Why ``module`` may not do what transformers' class ``name`` in ``home`` does; None if it does. Hooks are ignored.

    The words follow the module's name in a message.
    """
    cls = type(module)
    if module is None or not is_class(cls, home, name):
        return f"is a {cls.__name__} of {cls.__module__.partition('.')[0]}, not a plain {name}"
    if is_compiled(module):
        return "is compiled"
    if "_hf_hook" in module.__dict__:
        return "has a hook of accelerate's"
    if "forward" in module.__dict__ and not gives_its_part(module):
        sharded = has_sharded_forward(module)
        return "is sharded, and shares its work in a way of its own" if sharded else "has a forward of its own"
    for key, each in module.__dict__.items():
        if key != "forward" and callable(each) and callable(getattr(cls, key, None)):
            return f"has a `{key}` of its own"
    if not is_function(type(module).forward, home, f"{name}.forward"):
        return f"is a {name} whose forward has been replaced"
    return None


def why_not_plain(module: nn.Module | None, home: str, name: str) -> str | None:
    """The same for a module that will not be called at all: a hook on it would not run."""
    why = why_not_own(module, home, name)
    if why is not None or module is None:
        return why
    hooks = (hook for each in hook_dicts(module) for hook in each.values())
    return None if all(map(is_idle, hooks)) else "has hooks"


def why_not_linear(module: nn.Module | None) -> str | None:
    why = why_not_plain(module, nn.Linear.__module__, "Linear")
    if why is not None or module is None:
        return why
    own = module._parameters
    computed = set(own) != {"weight", "bias"} or own["weight"] is None or module._buffers
    return "computes its weight from others" if computed else None


def is_idle(hook: Any) -> bool:
    """Whether a hook is known to do nothing here."""
    home: str = getattr(hook, "__module__", None) or ""
    return home == _IDLE_HOOKS or (getattr(hook, "__name__", "") in _FOR_GRADIENTS and home.startswith(_FROM))


def hook_dicts(module: nn.Module) -> list[dict[int, Any]]:
    return [getattr(module, name) for name in _HOOKS]
