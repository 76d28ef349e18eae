"""Checkpoints of compressed-tensors unpack in a hook on the first forward pass: here, before memory is measured."""

from __future__ import annotations

import torch
from torch import nn

from ...patches.unmodified import code_home


@torch.no_grad()
def unpack(model: nn.Module) -> None:
    """Run the hook, which takes itself away. Does nothing to other models."""
    if not model._forward_pre_hooks:
        return
    for hook in list(model._forward_pre_hooks.values()):
        if code_home(hook).startswith("compressed_tensors.compressors."):
            hook(model, ())
