"""What an inspection of a model's architecture depends on beside its class: its config, and code that may be replaced.

A user may change all of it at any time: a window in the config, an attribute of a layer, a function of transformers.
The state taken here is compared at the start of each call. Only where it has changed is the model inspected anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.integrations import sdpa_attention

from ...errors import UnsupportedModelError
from ...patches.attention_swap import steps_lock

_PLAIN = frozenset([int, float, bool, str, type(None)])
# Set by the user's modes, by this library, or for training; they do not say which tokens a layer sees.
_SKIPPED = frozenset(
    ["gradient_checkpointing", "loss_type", "_attn_implementation_internal", "last_report", *nn.Module().__dict__]
)
# Modules of these libraries neither attend nor make masks; their own modules are not looked at.
_WITHOUT_ATTENTION = ("torch", "peft", "bitsandbytes", "torchao", "compressed_tensors")
# What a rotary embedding notes of its config, and does not change while it runs.
_OF_ROPE = ("rope_type", "original_max_seq_len")
_METHODS = (property, classmethod, staticmethod)
# Where each of these holds the function that it calls.
_CALLS: dict[type, str] = dict.fromkeys((MethodType, classmethod, staticmethod), "__func__")
_CALLS |= {property: "fget", cached_property: "func", partial: "func"}
_WITHOUT_DATA = torch.device("meta")


@dataclass
class CodeInUse:
    """One look at a model."""

    configs: list[PreTrainedConfig] = field(default_factory=list)
    implementations: list[str | None] = field(default_factory=list)  # of attention, for each config
    homes: list[ModuleType] = field(default_factory=list)  # the Python modules of the classes
    code: tuple[object, ...] = ()  # methods of the classes, and functions beside them
    architecture: tuple[object, ...] = ()  # what the notes of ``inspect_model`` depend on
    attention: tuple[object, ...] = ()  # what else custom code is judged by


def code_in_use(model: PreTrainedModel) -> CodeInUse:
    with steps_lock(model.config):  # a step in another thread swaps attention and forwards
        return _look(model)


def _look(model: PreTrainedModel) -> CodeInUse:
    look = CodeInUse()
    classes: dict[type, bool] = {}  # whether its instances are looked at: those with children, as all that attend are
    plain: list[object] = []
    configs: dict[int, PreTrainedConfig] = {id(model.config): model.config}
    numbers = {id(model.config): 0}  # of the configs, in the order in which they are found
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        held = module.__dict__
        if "_modules" not in held:
            raise UnsupportedModelError(
                f"the model holds a module that torch.jit traced or scripted ({type(module).__name__}). Its code and "
                "its state cannot be looked at: put back the module that it was made from, or use model.generate"
            )
        if not held["_modules"]:
            if "rope_type" in held:
                plain += [str(held.get(note)) for note in _OF_ROPE]
            continue
        cls = type(module)
        looked_at = classes.get(cls)
        if looked_at is None:
            home = cls.__module__.partition(".")[0]
            looked_at = classes[cls] = home not in _WITHOUT_ATTENTION
        if looked_at:
            plain.append(cls)
            plain += [(key, _read(value)) for key, value in plain_attributes(module).items()]
            if "forward" in held:
                plain.append(token_of(held["forward"]))
            if isinstance(config := held.get("config"), PreTrainedConfig):
                number = numbers.get(id(config))
                if number is None:
                    configs[id(config)] = config
                    number = numbers[id(config)] = len(numbers)
                plain.append(number)  # which module has which config
        elif cls.__module__.partition(".")[0] != "torch":
            continue
        waiting.extend(held["_modules"].values())
    look.configs = list(configs.values())
    look.homes = list(_homes([cls for cls, looked_at in classes.items() if looked_at]))
    code = _replaceable([cls for cls, looked_at in classes.items() if looked_at], look.homes)
    look.code = tuple(map(token_of, code))
    look.architecture = (type(model), *map(state_of, look.configs), *plain, *look.code)
    functions: list[tuple[str, Any]] = [
        *AttentionInterface._global_mapping.items(),
        *AttentionMaskInterface._global_mapping.items(),
    ]
    functions += masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping.items()
    for python_module in look.homes:
        if isinstance(interface := vars(python_module).get("ALL_ATTENTION_FUNCTIONS"), AttentionInterface):
            functions += interface._local_mapping.items()
    functions.append(("torch's", nn.functional.scaled_dot_product_attention))
    functions += [(name, model.__dict__.get(name, getattr(type(model), name, None))) for name in REPLACEABLE]
    look.implementations = [getattr(config, "_attn_implementation", None) for config in look.configs]
    look.attention = (
        *look.implementations,
        *((name, token_of(function)) for name, function in functions),
    )
    return look


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module notes of its config, for one: what a config may hold, and numbers of other libraries (NumPy's)."""
    held = module.__dict__.items()
    return {key: value for key, value in held if key not in _SKIPPED and (type(value) in _PLAIN or _is_number(value))}


def _is_number(value: Any) -> bool:
    """Whether it is a number that can be read, such as one in a tensor."""
    if not (hasattr(type(value), "__index__") or hasattr(type(value), "__float__")):
        return False
    return not getattr(value, "shape", ()) and getattr(value, "device", None) != _WITHOUT_DATA


def _read(value: Any) -> object:
    """Something that can be compared and hashed."""
    if type(value) in _PLAIN:
        return value
    return type(value), value.item() if hasattr(value, "item") else repr(value)


# Methods of ``generate`` that this library does not call, so that one of a user's would be passed over.
REPLACEABLE = (
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "generate",
    "_sample",
    "_beam_search",
    "_prefill",
    "_prepare_cache_for_generation",
    "_prepare_model_inputs",
    "_prepare_position_ids_for_generation",
    "_maybe_initialize_input_ids_for_generation",
    "_expand_inputs_for_generation",
    "_merge_criteria_processor_list",
    "_prepare_generated_length",
    "create_masks_for_generate",
)


def has_changed(model: PreTrainedModel, before: CodeInUse) -> bool:
    """Whether the model, or code that it runs, is other than it was ``before``."""
    now = code_in_use(model)
    return (before.architecture, before.attention) != (now.architecture, now.attention)


def _homes(classes: list[type]) -> Iterator[ModuleType]:
    names = {base.__module__ for cls in classes for base in cls.__mro__ if _is_model_code(base.__module__)}
    yield from (sys.modules[name] for name in sorted(names) if name in sys.modules)


def _is_model_code(home: str) -> bool:
    """Whether a Python module may define a model: one of transformers' models, or anybody else's."""
    top = home.partition(".")[0]
    return home.startswith("transformers.models.") or top not in (*_WITHOUT_ATTENTION, "transformers", "builtins")


def _replaceable(classes: list[type], homes: list[ModuleType]) -> Iterator[Any]:
    """The methods and properties of the classes, and the functions of transformers' Python modules.

    Functions of other modules are called by custom code alone, which tells by its numbers that they are others.
    """
    bases = {base: None for cls in classes for base in cls.__mro__ if _is_model_code(base.__module__)}
    for base in bases:
        yield from (value for value in vars(base).values() if callable(value) or isinstance(value, _METHODS))
    for home in (*homes, masking_utils, sdpa_attention):
        if home.__name__.startswith("transformers."):
            yield from (value for value in vars(home).values() if isinstance(value, FunctionType))


def token_of(value: Any) -> object:
    """Equal for the same code alone. Holds no object that may hold the model, and no address without what lay there."""
    return id(value), type(value), getattr(plain_function(value), "__code__", None)


def plain_function(value: Any) -> Any:
    """What a method, a property or a partial calls."""
    while (name := _CALLS.get(type(value))) is not None:
        value = getattr(value, name)
    return value


def state_of(config: PreTrainedConfig) -> object:
    return tuple(
        (key, state_of(value) if isinstance(value, PreTrainedConfig) else repr(value))
        for key, value in vars(config).items()
        if key not in _SKIPPED
    )
