"""All that a call might change in a model and in the process around it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from hf_batchllm.patches.attention_interface import context_in_use


def fingerprint(model: Any) -> Any:
    """Everything about a model, and about the process around it, that a call might have changed.

    But for the report that ``accelerated`` leaves on the model.
    """
    modules: dict[str, Any] = {}
    said: dict[int, str] = {}  # all layers hold the same config, and to write one takes half a millisecond

    def told(value: Any) -> str:
        if id(value) not in said:
            said[id(value)] = repr(value)
        return said[id(value)]

    for name, module in model.named_modules():
        held = {key: value for key, value in vars(module).items() if key != "last_report"}
        plain = {key: told(value) for key, value in held.items() if not isinstance(value, dict | nn.Module)}
        hooks = {key: list(value) for key, value in held.items() if key.endswith("_hooks")}
        modules[name] = (type(module), plain, hooks, sorted(held), id(getattr(module, "config", None)))
    tensors = {
        name: (id(tensor), *_identity(tensor)) for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    configs = {key: repr(value) for key, value in vars(model.config).items()}
    process = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    process += (torch.get_default_device(), torch.is_autocast_enabled("cpu"), context_in_use())
    return modules, tensors, configs, repr(vars(model.generation_config)), sorted(vars(model.config)), process


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    content = hashlib.sha256(
        tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    ).hexdigest()
    return tensor.data_ptr(), tensor._version, tensor.requires_grad, tensor.is_inference(), content
