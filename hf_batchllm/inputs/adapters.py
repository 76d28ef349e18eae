"""``adapter=``: which of a model's PEFT adapters each prompt runs with, checked before any work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..errors import OptionValueError, UnsupportedModelError
from ..notices import Notices
from ..patches.adapter_swap import active_of, adapted_layers
from ..wording import a_kind, did_you_mean, shown
from .base_model import base_model
from .named_options import LEFT_OUT
from .option_values import check_one_for_each

AS_IT_IS = LEFT_OUT  # no adapter is chosen: the model runs with its active adapters
_AN_ADAPTER_IS = "an adapter is given by its name, or None for the model without any"
_MOST_NAMED = 8
_NOT_TOKEN_BY_TOKEN = {  # PEFT's kinds of adapters that look at more than one token
    "LILY": "mixes its experts by all tokens of a batch",
    "POLY": "needs to be told a task for each prompt",
    "SHADOW": "runs a second model beside the layers",
    "XLORA": "runs each prompt beforehand to weigh its adapters",
}


def adapter_of_each(
    model: nn.Module,
    adapter: Any,
    count: int,
    notices: Notices | None = None,
    wrong: dict[int, str] | None = None,
) -> list[str | None] | None:
    """The adapter of each of ``count`` prompts (None: the model without any); None where no adapter is chosen.

    ``wrong`` takes the places of a list with a name that the model does not have, and why; without it, they raise.
    """
    if adapter is AS_IT_IS:
        _refuse_unsupported(model, active_adapters(model))
        return None
    if hasattr(adapter, "tolist"):  # a column of a table
        adapter = adapter.tolist()
    if adapter is None or isinstance(adapter, str):
        each = [adapter] * count
    elif isinstance(adapter, list | tuple):
        for place, name in enumerate(adapter):
            if not (name is None or isinstance(name, str)):
                raise OptionValueError("adapter", f"has {shown(name)} at place {place}: {_AN_ADAPTER_IS}")
        check_one_for_each("adapter", adapter, count)
        each = list(adapter)
    else:
        raise OptionValueError("adapter", f"is {a_kind(adapter)}: {_AN_ADAPTER_IS}, or a list with one for each prompt")
    configs = adapter_configs(model)
    in_a_list = isinstance(adapter, list | tuple)
    for place, name in enumerate(each):
        if name is None or name in configs:
            continue
        if not configs:
            how = "load them first (PeftModel.from_pretrained, or model.load_adapter)"
            raise OptionValueError("adapter", f"is {shown(name)}, and the model has no adapters: {how}")
        if wrong is None or not in_a_list:
            where = f" at place {place}" if in_a_list else ""
            raise OptionValueError("adapter", f"is {shown(name)}{where}; {_which_there_are(name, configs)}")
        wrong[place] = f"has the `adapter` {shown(name)}; {_which_there_are(name, configs)}"
    each = [None if wrong and place in wrong else name for place, name in enumerate(each)]
    asked = {name: None for name in each if name is not None}
    # Adapters of most kinds change something even while another adapter is active.
    _refuse_unsupported(model, {name for name, config in configs.items() if name in asked or not _is_activated(config)})
    for name, config in configs.items():
        if getattr(config, "is_adaption_prompt", False):
            why = f"cannot be chosen for a call: {shown(name)} replaces whole layers. Activate it before the call"
            raise OptionValueError("adapter", why)
    layers = adapted_layers(model)
    if asked and not layers:  # unloaded: the model would run without it, or with its merged weights
        raise OptionValueError(
            "adapter",
            f"is {shown(next(iter(asked)))}, and the model's layers have lost their adapters (unload(), "
            "merge_and_unload()): load them again",
        )
    merged = {name for layer in layers for name in getattr(layer, "merged_adapters", ())}
    if merged:
        raise OptionValueError(
            "adapter", f"cannot be chosen while {_listed(merged)} is merged into the weights: unmerge_adapter() first"
        )
    biased = [name for name, config in configs.items() if getattr(config, "bias", "none") not in ("none", False)]
    without = any(name is None and not (wrong and place in wrong) for place, name in enumerate(each))
    if biased and without and notices is not None:
        notices(
            "bias",
            f"{_listed(biased)} has trained biases of the model itself, which stay where `adapter` is None (in PEFT, "
            "too): that is not the original model",
        )
    return each if layers else None


def adapter_configs(model: nn.Module) -> Mapping[str, Any]:
    """PEFT's configs, by the adapters' names."""
    configs = getattr(model, "peft_config", None) or getattr(base_model(model), "peft_config", None)
    return configs if isinstance(configs, Mapping) else {}


def active_adapters(model: nn.Module) -> Iterable[str]:
    names = {name for layer in adapted_layers(model) for name in active_of(layer)}
    on_top = getattr(model, "active_adapters", ())  # adapters without layers, too; in transformers a method
    return names if callable(on_top) or getattr(model, "_adapters_disabled", False) else names.union(on_top)


def _which_there_are(name: str, configs: Mapping[str, Any]) -> str:
    return f"the model has {_listed(configs)}" + did_you_mean(name, configs, form="'{}'")


def _refuse_unsupported(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse adapters whose effect on a token depends on other tokens of the batch."""
    configs = adapter_configs(model)
    for name in sorted(names):
        why = _why_not(configs.get(name))
        if why is not None:
            raise UnsupportedModelError(
                f"the adapter {shown(name)} {why}, which is not supported: call the model's own `generate`"
            )


def _why_not(config: Any) -> str | None:
    if getattr(config, "is_prompt_learning", False):
        return "puts learned tokens in front of every prompt (prompt learning)"
    if _is_activated(config):
        return "starts at its invocation tokens (activated LoRA)"
    kind = getattr(getattr(config, "peft_type", None), "value", "")
    return f"{_NOT_TOKEN_BY_TOKEN[kind]} ({kind})" if kind in _NOT_TOKEN_BY_TOKEN else None


def _is_activated(config: Any) -> bool:
    return getattr(config, "alora_invocation_tokens", None) is not None


def _listed(names: Iterable[str]) -> str:
    listed = sorted(names)
    text = ", ".join(map(repr, listed[:_MOST_NAMED]))
    return text if len(listed) <= _MOST_NAMED else f"{text} and {len(listed) - _MOST_NAMED:,} more"
