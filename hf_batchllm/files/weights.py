"""Whether a model is the one that a run was begun with."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_LOOKED_AT = 8  # values of each parameter: training changes nearly all of them


def fingerprint(model: nn.Module) -> str:
    """Of the names, the shapes and some of the values of its parameters: cheap, and another one after any training."""
    names = hashlib.blake2b(digest_size=8)
    some: dict[torch.device, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        names.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        if parameter.is_meta or not parameter.numel():
            continue
        flat = parameter.detach().reshape(-1) if parameter.is_contiguous() else parameter.detach()[:1].reshape(-1)
        middle = len(flat) // 2
        values = torch.cat([flat[:_LOOKED_AT], flat[middle : middle + _LOOKED_AT]])
        some.setdefault(parameter.device, []).append(values.to(torch.float64))
    for values in some.values():
        names.update(torch.cat(values).cpu().numpy().tobytes())  # one copy for each device
    return names.hexdigest()
