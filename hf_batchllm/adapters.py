"""``adapter=``: which of a model's PEFT adapters each prompt is for, checked before any work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .architecture import base_model
from .errors import OptionValueError, UnsupportedOptionError
from .kinds import a_kind, shown
from .patches.adapter_swap import adapted_layers

AS_IT_IS = object()  # the model, with the adapters that are active on it
_MOST_NAMED = 8
_LOOKS_FURTHER = {  # than at a token at a time, by PEFT's name of the kind
    "POLY": "needs to be told a task for each prompt",
    "XLORA": "runs each prompt twice, first to weigh its adapters",
    "SHADOW": "runs a second model beside each layer",
}


def adapter_of_each(model: nn.Module, adapter: Any, count: int) -> list[str | None] | None:
    """The adapter of each of ``count`` prompts, None for the model without any; no list where nobody says which."""
    if adapter is AS_IT_IS:
        _refuse(model, dict.fromkeys(_active(model)), "has the active adapter")
        return None
    if hasattr(adapter, "tolist"):  # a column of a table
        adapter = adapter.tolist()
    if adapter is None or isinstance(adapter, str):
        each = [adapter] * count
    elif isinstance(adapter, list | tuple):
        for place, name in enumerate(adapter):
            if not (name is None or isinstance(name, str)):
                raise OptionValueError("adapter", f"has {shown(name)} at place {place}: {_IS}")
        if len(adapter) != count:
            why = f"is a list of {len(adapter):,} and there are {count:,} prompts: it must have one for each"
            raise OptionValueError("adapter", why)
        each = list(adapter)
    else:
        raise OptionValueError("adapter", f"is {a_kind(adapter)}: {_IS}, or a list with one for each prompt")
    asked = {name: None for name in each if name is not None}
    _refuse_unknown(model, asked)
    _refuse(model, asked, "asks for")
    layers = adapted_layers(model)
    merged = {name for layer in layers for name in getattr(layer, "merged_adapters", ())}
    if merged:
        raise OptionValueError(
            "adapter", f"cannot be chosen while {_listed(merged)} is merged into the weights: unmerge_adapter() first"
        )
    return each if layers else None


_IS = "an adapter is given by its name, or None for the model without any"


def adapter_configs(model: nn.Module) -> Mapping[str, Any]:
    """PEFT's, by the adapters' names."""
    configs = getattr(model, "peft_config", None) or getattr(base_model(model), "peft_config", None)
    return configs if isinstance(configs, Mapping) else {}


def _active(model: nn.Module) -> Iterable[str]:
    for layer in adapted_layers(model):
        if not layer.disable_adapters:
            yield from [layer.active_adapters] if isinstance(layer.active_adapters, str) else layer.active_adapters


def _refuse_unknown(model: nn.Module, asked: Iterable[str]) -> None:
    configs = adapter_configs(model)
    for name in asked:
        if not configs:
            raise OptionValueError(
                "adapter",
                f"is {shown(name)}, and the model has no adapters: load them first (PeftModel.from_pretrained, or "
                "model.load_adapter)",
            )
        if name not in configs:
            raise OptionValueError("adapter", f"is {shown(name)}; the model has {_listed(configs)}")


def _refuse(model: nn.Module, asked: Iterable[str], verb: str) -> None:
    """What does not do the same thing to each token, whatever comes along in a batch."""
    configs = adapter_configs(model)
    for name in asked:
        config = configs.get(name)
        kind = getattr(getattr(config, "peft_type", None), "value", "")
        if getattr(config, "is_prompt_learning", False):
            why = "puts learned tokens in front of prompts (prompt learning)"
        elif getattr(config, "is_adaption_prompt", False):
            why = "brings an attention of its own"
        elif getattr(config, "alora_invocation_tokens", None) is not None:
            why = "begins where its invocation tokens stand (activated LoRA)"
        elif kind in _LOOKS_FURTHER:
            why = f"{_LOOKS_FURTHER[kind]} ({kind})"
        else:
            continue
        raise UnsupportedOptionError(
            "adapter", f"{verb} {shown(name)}, which {why}: that is not supported. Call the model's own `generate`"
        )


def _listed(names: Iterable[str]) -> str:
    listed = sorted(names)
    text = ", ".join(map(repr, listed[:_MOST_NAMED]))
    return text if len(listed) <= _MOST_NAMED else f"{text} and {len(listed) - _MOST_NAMED:,} more"
