"""Weights that are spread over processes: each holds a part, and no process alone can run the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import UnsupportedModelError
from ...patches.adapter_swap import adapted_layers
from ...patches.sharded_modules import gives_its_part

_WHOLE = "load the model whole on one device, in a process of its own"
# By the name of the class of a parameter, how it came about. By name: importing these modules takes a second.
_SHARDED = {
    "DTensor": "by tensor parallelism of another kind than transformers', or by FSDP",
    "FlatParameter": "by FSDP",
}


def refuse_sharded(model: torch.nn.Module, parameters: Sequence[torch.Tensor], name: str) -> None:
    """Refuse weights that are spread in another way than by transformers' tensor parallelism alone."""
    how = None
    if (getattr(model, "_tp_size", None) or 1) > 1:
        why_not = _why_not_tensor_parallel(model)
        if why_not is None:
            return
        how = f"by transformers' tensor parallelism, {why_not}"
    for kind in set(map(type, parameters)):
        how = how or _SHARDED.get(kind.__name__)
    if how is None and any(_is_let_go(each) for each in parameters):
        raise UnsupportedModelError(
            f"{name} has its weights spread over several processes, by DeepSpeed's ZeRO-3: generate while they are "
            "gathered, in a block `with deepspeed.zero.GatheredParameters(list(model.parameters())):`"
        )
    if how is not None:
        raise UnsupportedModelError(
            f"{name} has its weights spread over several processes, {how}; that is not supported: {_WHOLE}"
        )


def _is_let_go(parameter: torch.Tensor) -> bool:
    """Whether it is one of DeepSpeed's ZeRO-3, and not gathered now."""
    shape: Any = getattr(parameter, "ds_shape", None)
    return hasattr(parameter, "ds_id") and (shape is None or tuple(parameter.shape) != tuple(shape))


def refuse_adapters_of_sharded(model: torch.nn.Module, name: str) -> None:
    if any(True for _ in adapted_layers(model)):
        raise UnsupportedModelError(
            f"{name} has adapters, and its weights are spread over several processes by transformers' tensor "
            "parallelism: both together are not supported. Merge the adapter into the weights before they are spread"
        )


def _why_not_tensor_parallel(model: Any) -> str | None:
    """Why this library cannot run the model where it is spread so, in words that follow "parallelism,"."""
    size = model._tp_size
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or mesh.size() != size:
        return "and in another way as well"
    asked = getattr(model.config, "distributed_config", None)
    if (getattr(asked, "ep_size", None) or 1) > 1 or getattr(asked, "enable_expert_parallel", False):
        return "with experts of its own on each process"
    if getattr(model.config, "quantization_config", None) is not None:
        return "and quantised"
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    if "sequence_parallel" in plan.values():
        return "with a part of the sequence on each process"
    config = model.config.get_text_config(decoder=True)
    for module in model.modules():
        for name in ("q_proj", "k_proj"):
            projection, width = getattr(module, name, None), getattr(module, "head_dim", None)
            if isinstance(projection, torch.nn.Linear) and isinstance(width, int) and gives_its_part(projection):
                heads = projection.out_features // width
                if heads % size:
                    return f"and `{name}` of a layer has {heads} heads, which cannot be divided by {size}"
        projection, heads = getattr(module, "query_key_value", None), getattr(config, "num_attention_heads", 0)
        if isinstance(projection, torch.nn.Linear) and gives_its_part(projection) and heads % size:
            return f"and `query_key_value` of a layer has {heads} heads, which cannot be divided by {size}"
        sparse, gate = getattr(module, "activation_sparsity", 0), getattr(module, "gate_proj", None)
        if sparse and isinstance(gate, torch.nn.Linear) and gives_its_part(gate):
            # Gemma 3n: what the largest activations are depends on all of them.
            return "and keeps the largest of its activations alone, of which each process has a part"
    return None
