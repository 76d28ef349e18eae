"""Recognises a model: the one that a run was begun with, or the one that another process has."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from ..patches.sharded_modules import local
from .float64 import in_float64

_VALUES_READ = 8  # at two places of each parameter: training changes nearly all values


def fingerprint(model: nn.Module) -> str:
    """A checksum of the parameters' names, shapes and some values: cheap, and different after any training."""
    checksum = hashlib.blake2b(digest_size=8)
    values: dict[torch.device, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        checksum.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        if parameter.is_meta or not parameter.numel():
            continue
        part = local(parameter.detach())
        flat = part.reshape(-1) if part.is_contiguous() else part[:1].reshape(-1)
        middle = len(flat) // 2
        ends = torch.cat([flat[:_VALUES_READ], flat[middle : middle + _VALUES_READ]])
        exact = in_float64(ends)
        values.setdefault(exact.device, []).append(exact)
    for of_device in values.values():
        checksum.update(torch.cat(of_device).cpu().numpy().tobytes())  # one copy for each device
    return checksum.hexdigest()
