"""Timing of work on a device, which may run behind the host."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """Frees what earlier runs have left in memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    synchronize(device)


def timed(device: torch.device, work: Callable[[], T]) -> tuple[float, T]:
    """Seconds that ``work`` takes, with memory freed beforehand, and what it returns."""
    free_memory(device)
    began = time.perf_counter()
    value = work()
    synchronize(device)
    return time.perf_counter() - began, value
