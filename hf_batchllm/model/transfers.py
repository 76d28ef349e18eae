"""Small arrays to the device, and results back to the host, without waiting for the steps in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from ..kernels.lists.work_lists import sent


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` the current one: Triton launches there, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A GPU gets the array through pinned memory, so that the host does not wait. On a CPU the memory is shared."""
    return sent(torch.from_numpy(array), device, non_blocking=device.type == "cuda")


def start_copy_to_host(tensor: torch.Tensor) -> Callable[[], np.ndarray]:
    """Start a copy on the current stream, and return a function that waits for this copy alone and gives it."""
    if tensor.device.type != "cuda":
        now = tensor.cpu().numpy().copy()  # the next step may write to the same place
        return lambda: now
    landed = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    landed.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def wait() -> np.ndarray:
        event.synchronize()
        return landed.numpy()

    return wait
