"""One card for two processes: numbers of cards may differ between them, where CUDA_VISIBLE_DEVICES was changed."""

from __future__ import annotations

import torch


def mark_of(device: torch.device) -> str:
    """What tells this card from all others; empty where there is nothing of the kind."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def device_with(mark: str, named: torch.device) -> torch.device:
    """The card with this mark; the one that is ``named`` where there are no marks."""
    if not mark:
        return named
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if mark_of(device) == mark:
            return device
    raise OSError("a new process does not see this card (has CUDA_VISIBLE_DEVICES been changed since CUDA began?)")
