"""What is noted of a model: whether it can be captured, whether it is the one of before, and where its weights lie.

Captured graphs replay what the model was when they were captured, and kept prefixes hold what it computed. Neither must
be used once the model is another.
"""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import PreTrainedConfig

from ...inputs.base_model import base_model
from ...patches.attention_interface import autocast_dtype
from ...patches.attention_swap import steps_lock
from ...patches.sharded_modules import local
from ...patches.uncompiled import every_module, own_forward
from ...patches.unmodified import code_home, is_idle
from ..matmul_precision import matmul_settings
from .code_in_use import state_of, token_of

# Forwards that quantisation puts on single modules: they compute with tensors and do nothing else.
_TENSOR_CODE = ("transformers.integrations.", "compressed_tensors.quantization.")

# What modules hold that is looked at in a way of its own, or has no part in a forward pass.
_APART = frozenset(
    [
        *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"),
        *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook", "_non_persistent_buffers_set"),
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
        *("_forward_hooks_always_called", "_is_hf_initialized"),
        *("generate", "generation_config", "warnings_issued"),
        # Of accelerated(): what stands in for methods, and what is left.
        *("generate_batch", "init_continuous_batching", "continuous_batching_context_manager", "last_report"),
        # Of gradient checkpointing, which trainers switch off and on again around each rollout.
        *("_gradient_checkpointing_func", "_require_grads_hook", "_require_grads_hooks"),
        # PEFT's notes of the active adapters, of which the prompts' keys tell.
        *("_active_adapter", "active_adapter", "active_adapters"),
        *("_disable_adapters", "disable_adapters", "_adapters_disabled"),
    ]
)
# The layers of a RoPE that depends on the length note these while they run.
_NOTED_BY_ROPE = ("long_inv_freq", "original_inv_freq", "max_seq_len_cached")
# Compared by value.
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def not_in_graphs(model: nn.Module) -> str | None:
    """Why ``model`` cannot be captured: a replay would skip Python code of its user's. None if it can be."""
    with steps_lock(base_model(model).config):
        return _not_in_graphs(model)


def _not_in_graphs(model: nn.Module) -> str | None:
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return "the hooks on all modules would not be called"
    if not any(has_hooks(module) or "forward" in module.__dict__ for module in every_module(model)):
        return None  # names take long to make
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
    return bool(_hooks_in(module.__dict__))


def stamp_of(model: nn.Module, device: torch.device) -> list[object]:
    """Equal for as long as a model that runs no custom code computes the same, but for the values of its weights.

    Modules, parameters and buffers are not held: what the user takes out is freed. A step in another thread is waited
    for: it puts forwards in place for as long as it runs.
    """
    with steps_lock(base_model(model).config):
        modules = [_noted_module(name, module) for name, module in model.named_modules()]
        held = (each for module in every_module(model) for each in module.__dict__.values())
        configs = {id(each): each for each in held if isinstance(each, PreTrainedConfig)}
        return [_settings(device), *map(state_of, configs.values()), *modules]


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers and tensors that are attributes of modules, each once."""
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        held = module.__dict__
        for each in (*held["_parameters"].values(), *held["_buffers"].values(), *held.values()):
            if isinstance(each, torch.Tensor):
                found[id(each)] = each
    return list(found.values())


def _noted_module(name: str, module: nn.Module) -> tuple[object, ...]:
    held, kind = module.__dict__, type(module)
    notes = {key: _noted(each) for key, each in held.items() if key not in _APART and not key.endswith(_NOTED_BY_ROPE)}
    return name, kind, token_of(getattr(kind, "forward", None)), _hooks_in(held), notes


def _noted(value: Any) -> object:
    """Equal for equal plain values, and for the same objects. The digest of the weights tells what tensors hold."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, dict):
        return {key: _noted(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return list(map(_noted, value))
    return type(value) if isinstance(value, (torch.Tensor, PreTrainedConfig)) else token_of(value)


class HeldMemory:
    """The memory of a model's weights, held so that a captured graph never reads what has been freed.

    Casting or moving a model, as ``model.half()`` does, puts other memory below the same tensors. What is asked between
    two steps must not take long, so other modules in the place of these are not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        places: list[dict[str, Any]] = []
        for module in every_module(model):
            places += [module._parameters, module._buffers]
        self._places = [place for place in places if place]
        self._tensors = self._tensors_now()
        self._held = [each.detach() for each in self._tensors]
        self._sharded = [each for each in self._tensors if local(each) is not each]
        self._plain = [each for each in self._tensors if local(each) is each and _has_memory(each)]
        self._addresses = self._addresses_now()

    def is_in_use(self) -> bool:
        """Whether the model has these weights, where they were."""
        now = self._tensors_now()
        same = len(now) == len(self._tensors) and all(map(is_, now, self._tensors))
        return same and self._addresses_now() == self._addresses

    def _tensors_now(self) -> list[torch.Tensor]:
        found = chain.from_iterable(place.values() for place in self._places)
        return [each for each in found if each is not None]

    def _addresses_now(self) -> list[int]:
        return [*map(torch.Tensor.data_ptr, self._plain), *(local(each).data_ptr() for each in self._sharded)]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own: one that is made of others has none."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def _settings(device: torch.device) -> tuple[Any, ...]:
    everywhere = nn.modules.module
    return (
        autocast_dtype(device),
        torch.get_default_dtype(),
        matmul_settings(device),
        _named(everywhere._global_forward_hooks),
        _named(everywhere._global_forward_pre_hooks),
        nn.Module._call_impl,
        *_modes(),
    )


def _modes() -> list[tuple[int, type]]:
    """The function and dispatch modes that a caller runs under: they may change what any operation gives."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [(id(mode), type(mode)) for mode in modes if not isinstance(mode, DeviceContext)]


def _hooks_in(held: dict[str, Any]) -> tuple[Any, ...]:
    after, before = held["_forward_hooks"], held["_forward_pre_hooks"]
    return (*_named(before), *_named(after)) if after or before else ()


def _named(hooks: dict[int, Any]) -> tuple[tuple[int, int], ...]:
    """Each hook by its number, which no other one gets, and by itself. Without the idle ones."""
    return tuple((key, id(hook)) for key, hook in hooks.items() if not is_idle(hook))
