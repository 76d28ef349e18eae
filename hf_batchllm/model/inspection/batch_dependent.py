"""Quantised models whose activations are scaled over a whole step: a token's answer then depends on its neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

# Of PyTorch itself (``torch.ao.quantization.quantize_dynamic``): one scale for all activations of a pass.
_DYNAMIC = ("torch.ao.nn.quantized.dynamic.", "torch.ao.nn.intrinsic.quantized.dynamic.")


def depends_on_batch(model: nn.Module, modules: Iterable[nn.Module] = ()) -> str | None:
    """Why, in words that follow the model's name; None for models whose rows are independent of each other.

    modules: all of the model's.

    Scales for each token or each group of a token, scales that were fixed beforehand, and quantised weights alone are
    harmless: that is most of transformers' quantizers (FBGEMM's and DeepSeek's FP8, BitNet, GPTQ, AWQ, HQQ and so on).
    """
    given = getattr(getattr(model, "config", None), "quantization_config", None)
    config: Any = (
        given if given is not None else getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    )
    method = str(getattr(_field(config, "quant_method"), "value", _field(config, "quant_method")) or "")
    in_8bit = getattr(model, "is_loaded_in_8bit", False) or _field(config, "load_in_8bit")
    if in_8bit and _field(config, "llm_int8_threshold") != 0.0:  # without a threshold there are no such columns
        return "is quantised with LLM.int8 (`load_in_8bit`), which chooses outlier columns for a whole batch"
    if method == "torchao" and _scales_tensors(_field(config, "quant_type")):
        return "has activations that torchao scales for a whole batch (PerTensor)"
    if method in ("compressed-tensors", "quark") and any(map(_is_dynamic_tensor, _activations(config))):
        return f"has activations that {method} scales for a whole batch (dynamic, by tensor)"
    if any(kind.__module__.startswith(_DYNAMIC) for kind in set(map(type, modules))):
        return "has activations that torch.ao scales for a whole batch (dynamic quantisation)"
    return None


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _scales_tensors(quantisation: Any) -> bool:
    """``Float8DynamicActivation...Config(granularity=PerTensor())``, which is torchao's default there."""
    name = type(quantisation).__name__
    granularity = getattr(quantisation, "granularity", None)
    each = granularity if isinstance(granularity, list | tuple) else [granularity]
    return "DynamicActivation" in name and any(type(one).__name__ == "PerTensor" for one in each)


def _activations(config: Any) -> Iterator[Any]:
    """What the groups of a config say of activations, as objects or as the dicts of a checkpoint."""
    inner = _field(config, "quantization_config")
    groups = _field(inner if inner is not None else config, "config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        yield _field(group, "input_activations")


def _is_dynamic_tensor(activations: Any) -> bool:
    strategy = _field(activations, "strategy")
    return _field(activations, "dynamic") is True and str(getattr(strategy, "value", strategy)) == "tensor"
