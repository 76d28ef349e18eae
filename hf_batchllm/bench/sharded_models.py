"""A model that several processes have together, with random weights: each makes the part that it holds."""

from __future__ import annotations

import inspect
import zlib
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from ..patches.sharded_modules import local

_SPREAD = 0.02  # of random weights


def random_sharded(config: Any, processes: int, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Sharded as ``from_pretrained`` shards it, without files. The process group must be there."""
    asked = DistributedConfig(tp_size=processes)
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=dtype)
    prepared = type(model).prepare_distribute_model(asked)
    mesh = prepared[-1]
    model = type(model).maybe_distribute_model(model, prepared[0], mesh)
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        for name, module in model.named_modules():
            for key, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[key] = _made(f"{name}.{key}", weight, device, rank)
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = _buffer_of(module, key, device)
    model.tie_weights()
    model.eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    made: PreTrainedModel = model
    return made


def _made(name: str, weight: torch.Tensor, device: torch.device, rank: int) -> nn.Parameter:
    part = local(weight)
    is_whole = part is weight or all(each.is_replicate() for each in weight.placements)  # type: ignore[attr-defined]
    torch.manual_seed(zlib.crc32(f"{name} {'' if is_whole else rank}".encode()))  # copies of a weight are equal
    fresh = torch.empty(part.shape, dtype=part.dtype, device=device)
    fresh = fresh.fill_(1.0) if "norm" in name and fresh.ndim == 1 else fresh.normal_(0.0, _SPREAD)
    if part is weight:
        return nn.Parameter(fresh, requires_grad=False)
    from torch.distributed.tensor import DTensor

    mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
    made = DTensor.from_local(fresh, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())
    return nn.Parameter(made, requires_grad=False)


def _buffer_of(module: nn.Module, key: str, device: torch.device) -> torch.Tensor:
    """As the class makes it of its config: angles of RoPE."""
    takes = inspect.signature(type(module).__init__).parameters
    if "config" not in takes:
        raise ValueError(f"{type(module).__name__} has a buffer `{key}` that its config does not tell")
    make: Any = type(module)
    fresh: torch.Tensor = make(module.config).to(device)._buffers[key]
    return fresh
