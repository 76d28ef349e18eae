"""Code of a user's between ``generate`` and the model's layers, which this library would pass over.

That is an attention function or a mask: where it is not transformers' own, the model is refused by name.
"""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.integrations import sdpa_attention

from ...errors import UnsupportedModelError
from ...patches.uncompiled import past_trainers
from .code_in_use import CodeInUse, plain_function

_THEIRS = frozenset(["transformers", "torch", "contextlib", "functools", "peft", "accelerate", "hf_batchllm"])
# Libraries whose modules and hooks change nothing, or treat every token alike; where one does not, ``batch_dependent``
# says so.
KNOWN_LIBRARIES = frozenset(
    ["transformers", "torch", "accelerate", "peft", "bitsandbytes", "compressed_tensors", "torchao", "hf_batchllm"]
)
_PLAIN_ATTENTION = ("sdpa", "eager")  # what a user may go back to


def refuse_custom_code(model: PreTrainedModel, look: CodeInUse, name: str) -> None:
    """Refuse code that would be passed over, or that changes attention in a way which cannot be seen from outside."""
    text = type(model.config.get_text_config(decoder=True))
    pairs = zip(look.configs, look.implementations, strict=True)
    used = {implementation for config, implementation in pairs if type(config) is text or config is model.config}
    _refuse_attention(look, sorted(each for each in used if each is not None), name)
    _refuse_functions(look, used, name)


def _refuse_attention(look: CodeInUse, used: list[str], name: str) -> None:
    for implementation in used:
        for home in look.homes:
            function = _attention_function(home, implementation)
            if function is not None and not is_theirs(function) and "/" not in implementation:
                raise UnsupportedModelError(
                    f"{name} attends by `{implementation}`, the function {_described(function)}, which is not "
                    "transformers' own: this library puts its own attention there, and what the function does would be "
                    f"lost. If plain attention is meant, {_way_back(home)} first"
                )
        mask = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
        if mask is not None and not is_theirs(mask):
            raise UnsupportedModelError(
                f"{name} has its attention masks made by the function {_described(mask)}, registered as "
                f"`{implementation}`, which is not transformers' own; masks of one's own are not supported"
            )


def _attention_function(home: ModuleType, implementation: str) -> Any:
    """What a layer defined in ``home`` attends by; None where none of its layers attends."""
    interface = vars(home).get("ALL_ATTENTION_FUNCTIONS")
    default = vars(home).get("eager_attention_forward")
    if interface is None:
        return default if implementation == "eager" else None
    if not isinstance(interface, AttentionInterface):
        return interface
    return interface.get(implementation, default)


def _way_back(home: ModuleType) -> str:
    for implementation in _PLAIN_ATTENTION:
        function = _attention_function(home, implementation)
        if function is not None and is_theirs(function):
            return f'call model.set_attn_implementation("{implementation}")'
    return "register transformers' own again"


def _refuse_functions(look: CodeInUse, used: set[str | None], name: str) -> None:
    """Functions by which transformers describes masks, and those of its own attention, where they were replaced."""
    makers = {key: each for key, each in vars(masking_utils).items() if isinstance(each, FunctionType)}
    places: list[tuple[ModuleType, str, Any]] = [(masking_utils, key, each) for key, each in makers.items()]
    if "sdpa" in used:
        attend = nn.functional.scaled_dot_product_attention
        if attend is not torch._C._nn.scaled_dot_product_attention:  # SageAttention is put there, for one
            places.append((nn.functional, "scaled_dot_product_attention", attend))
        places += [(sdpa_attention, key, vars(sdpa_attention).get(key)) for key in ("repeat_kv", "use_gqa_in_sdpa")]
    for home in look.homes:
        if home.__name__.startswith("transformers."):
            held = vars(home)
            places += [(home, key, each) for key, each in held.items() if key in makers or "mask" in key]
            if "eager" in used and "repeat_kv" in held:
                places.append((home, "repeat_kv", held["repeat_kv"]))
    for home, key, each in places:
        if callable(each) and not isinstance(each, type) and not is_theirs(each):
            raise UnsupportedModelError(
                f"{name}: `{home.__name__}.{key}` has been replaced by {_described(each)}. What it does would be lost, "
                "or could not be checked: this library puts its own attention there, without masks. Put transformers' "
                "own function back first"
            )


def is_theirs(function: Any) -> bool:
    """Whether a callable is code of transformers', or of a library whose wrappers change nothing here.

    Decided by where the code stands: wrappers copy names and modules (``functools.wraps``).
    """
    while True:
        function = plain_function(function)
        if not isinstance(function, FunctionType):
            return _top(type(function).__module__) in _THEIRS
        elif (called := past_trainers(function)) is not function:
            function = called
        elif _top(function.__globals__.get("__name__", "")) not in _THEIRS:
            return False
        elif (wrapped := getattr(function, "__wrapped__", None)) is None:
            return True
        else:
            function = wrapped


def _top(home: str) -> str:
    return home.partition(".")[0]


def _described(function: Any) -> str:
    function = plain_function(function)
    shown = function if hasattr(function, "__qualname__") else type(function)
    return f"{shown.__module__}.{shown.__qualname__}"
