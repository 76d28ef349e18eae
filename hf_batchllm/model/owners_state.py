"""What a model's owner may set on it that a captured graph would miss: hooks, modes, other weights."""

from __future__ import annotations

import torch
from torch import nn

from ..patches.attention_interface import autocast_dtype
from ..patches.uncompiled import own_forward
from ..patches.unmodified import IDLE_HOOKS, code_home

# Forwards that quantisation puts on single modules: they compute with tensors and do nothing else.
_TENSOR_CODE = ("transformers.integrations.", "compressed_tensors.quantization.")


def not_in_graphs(model: nn.Module) -> str | None:
    """Why ``model`` cannot be captured: a replay would skip Python code of its owner's. None if it can be."""
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return "the hooks on all modules would not be called"
    for name, module in model.named_modules():
        where = f"`{name}`" if name else "the model"
        if has_hooks(module):
            return f"the hooks on {where} would not be called"
        forward = own_forward(module)
        if forward is not None and not code_home(forward).startswith(_TENSOR_CODE):
            return f"{where} has a `forward` of its own, which would not be called"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Whether it has hooks that do something. transformers leaves idle ones behind."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(getattr(hook, "__module__", "") != IDLE_HOOKS for hook in hooks)


def owners_state(model: nn.Module, device: torch.device) -> object:
    """A value that changes when the owner changes anything that captured graphs depend on: see ``not_in_graphs``.

    It is asked for often, so it reads the modules' ``__dict__``, past their ``__getattr__``.
    """
    everywhere = nn.modules.module
    state: list[object] = [autocast_dtype(device)]
    state += [len(everywhere._global_forward_hooks), len(everywhere._global_forward_pre_hooks)]
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        held = module.__dict__
        state += [held["training"], id(held.get("forward")), len(held["_forward_hooks"])]
        state.append(len(held["_forward_pre_hooks"]))
        for tensors in (held["_parameters"], held["_buffers"]):
            state += [tensor.data_ptr() for tensor in tensors.values() if tensor is not None]
        # A property in PEFT's layers; transformers' models have a method of that name.
        if isinstance(getattr(type(module), "disable_adapters", None), property) or "disable_adapters" in held:
            names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
            state += [str(getattr(module, name, None)) for name in names]
        waiting.extend(held["_modules"].values())
    return state
