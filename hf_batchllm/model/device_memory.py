"""What is asked of a device's memory: how much there is, what has been taken, and to have what is unused given back."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import psutil
import torch

_CPU_SHARE = 0.5  # the rest of the machine lives there, too
_OTHER_SHARE = 0.9


class Used(NamedTuple):
    allocated: int  # bytes of tensors
    reserved: int  # what the allocator holds for them: with its rounding, its gaps, and what it keeps for later


class DeviceMemory(Protocol):
    """The memory of one device."""

    share: float  # of what is free, for the KV cache, where nothing better is known
    taken_at_once: bool  # the KV cache takes its memory when it is opened, not layer by layer in the first step

    def free(self) -> int:
        """Bytes that are to be had."""

    def trim(self) -> None:
        """Give back to the device what the allocator holds and nobody uses."""

    def used(self) -> Used:
        """By this process, now."""

    def start(self) -> None:
        """A call begins."""

    def mark(self) -> None:
        """``peak`` is asked for from here on."""

    def peak(self) -> Used:
        """The most of each since ``mark``."""

    def highest(self) -> int:
        """Bytes of tensors, at most, since ``start``."""


class HostMemory:
    """Memory that nobody reserves beforehand and nobody keeps books of."""

    taken_at_once = False

    def __init__(self, share: float) -> None:
        self.share = share

    def free(self) -> int:
        return psutil.virtual_memory().available

    def trim(self) -> None:
        pass

    def used(self) -> Used:
        return Used(0, 0)

    def start(self) -> None:
        pass

    def mark(self) -> None:
        pass

    def peak(self) -> Used:
        return Used(0, 0)

    def highest(self) -> int:
        return 0


class CudaMemory:
    """As PyTorch's allocator tells it. Its peaks can only be set back for everybody, so ``start`` does just that."""

    share = _OTHER_SHARE
    taken_at_once = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._earlier = 0  # the highest since ``start``, up to the last ``mark``

    def free(self) -> int:
        used = self.used()
        free, total = torch.cuda.mem_get_info(self._device)
        return max(0, min(free + used.reserved, int(self._allowed() * total)) - used.allocated)

    def _allowed(self) -> float:
        """The share of the device that its user lets PyTorch have."""
        ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        return ask(self._device) if ask is not None and torch.cuda.get_allocator_backend() == "native" else 1.0

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def used(self) -> Used:
        return Used(torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device))

    def start(self) -> None:
        self._earlier = 0
        torch.cuda.reset_peak_memory_stats(self._device)

    def mark(self) -> None:
        self._earlier = self.highest()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> Used:
        return Used(torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device))

    def highest(self) -> int:
        return max(self._earlier, torch.cuda.max_memory_allocated(self._device))


class UncountedMemory(HostMemory):
    """A GPU's, under an allocator that is not PyTorch's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(_OTHER_SHARE)
        self._device = device

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]


def device_memory(device: torch.device) -> DeviceMemory:
    if device.type == "cuda":
        counted = torch.cuda.get_allocator_backend() in ("native", "cudaMallocAsync")
        return CudaMemory(device) if counted else UncountedMemory(device)
    return HostMemory(_CPU_SHARE if device.type == "cpu" else _OTHER_SHARE)


def is_out_of_memory(error: BaseException) -> bool:
    # A CPU's allocator has no class of its own for that.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
