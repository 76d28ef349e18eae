"""The memory of a device: how much is free, how much this process has taken, and giving back what is unused."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import psutil
import torch

_CPU_SHARE = 0.5  # other programs need memory, too; a Mac's GPU has the same memory as they
_OTHER_SHARE = 0.9


class MemoryUse(NamedTuple):
    allocated: int  # bytes of tensors
    reserved: int  # bytes that the allocator holds for them, with rounding, gaps, and what it keeps for later


class DeviceMemory(Protocol):
    """The memory of one device."""

    share: float  # of the free memory, for the KV cache, where nothing better is known
    taken_at_once: bool  # the KV cache takes its memory when it is opened, not layer by layer in the first step

    def free(self) -> int:
        """Bytes that this process may still take."""

    def trim(self) -> None:
        """Give memory back to the device that the allocator holds and no tensor uses."""

    def used(self) -> MemoryUse:
        """What this process uses now."""

    def start(self) -> None:
        """A call begins."""

    def mark(self) -> None:
        """``peak`` counts from here on."""

    def peak(self) -> MemoryUse:
        """The most of each number since ``mark``."""

    def taken_since_mark(self) -> int:
        """Bytes that were taken since ``mark``, and are not in use any more. What nothing uses is given back."""

    def highest(self) -> int:
        """The most bytes of tensors since ``start``."""


def _free_on_host() -> int:
    available: int = psutil.virtual_memory().available
    return available


class HostMemory:
    """Memory that is neither reserved beforehand nor counted."""

    taken_at_once = False

    def __init__(self, share: float) -> None:
        self.share = share

    def free(self) -> int:
        return _free_on_host()

    def trim(self) -> None:
        pass

    def used(self) -> MemoryUse:
        return MemoryUse(0, 0)

    def start(self) -> None:
        pass

    def mark(self) -> None:
        pass

    def peak(self) -> MemoryUse:
        return MemoryUse(0, 0)

    def taken_since_mark(self) -> int:
        return 0

    def highest(self) -> int:
        return 0


class CountedMemory:
    """A GPU's, counted by PyTorch's allocator. ``start`` resets its peaks for the whole process: it has no others.

    ``counts``: PyTorch's module for such devices, `torch.cuda` or `torch.xpu`.
    """

    share = _OTHER_SHARE
    taken_at_once = True

    def __init__(self, device: torch.device, counts: Any) -> None:
        self._device = device
        self._counts = counts
        self._highest_before_mark = 0  # since ``start``

    def free(self) -> int:
        used = self.used()
        free, total = self._free_and_total(used)
        return max(0, min(free + used.reserved, int(self._allowed() * total)) - used.allocated)

    def _free_and_total(self, used: MemoryUse) -> tuple[int, int]:
        free, total = self._counts.mem_get_info(self._device)
        return free, total

    def _allowed(self) -> float:
        """The share of the device that PyTorch may take: users can set one."""
        fraction = getattr(self._counts, "get_per_process_memory_fraction", None)  # not in every PyTorch
        return fraction(self._device) if fraction is not None else 1.0

    def trim(self) -> None:
        try:
            self._counts.empty_cache()
        except RuntimeError as error:  # whatever uses the device next raises it again, and says what it was about
            if not is_device_error(error):
                raise

    def used(self) -> MemoryUse:
        return MemoryUse(self._counts.memory_allocated(self._device), self._counts.memory_reserved(self._device))

    def start(self) -> None:
        self._highest_before_mark = 0
        self._counts.reset_peak_memory_stats(self._device)

    def mark(self) -> None:
        self._highest_before_mark = self.highest()
        self._counts.reset_peak_memory_stats(self._device)

    def peak(self) -> MemoryUse:
        counts = self._counts
        return MemoryUse(counts.max_memory_allocated(self._device), counts.max_memory_reserved(self._device))

    def taken_since_mark(self) -> int:
        peak = self.peak()
        self.trim()
        # Compared with the memory in use afterwards: what the first run allocates for good is not needed a second time.
        left = self.used()
        return max(peak.allocated - left.allocated, peak.reserved - left.reserved, 0)

    def highest(self) -> int:
        since: int = self._counts.max_memory_allocated(self._device)
        return max(self._highest_before_mark, since)


class CudaMemory(CountedMemory):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device, torch.cuda)

    def _allowed(self) -> float:
        return super()._allowed() if torch.cuda.get_allocator_backend() == "native" else 1.0


class XpuMemory(CountedMemory):
    """Memory of Intel's GPUs. That of one within a processor is the host's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, torch.xpu)
        properties: Any = torch.xpu.get_device_properties(device)  # torch's types lack some of its fields
        self._total = int(properties.total_memory)
        # Drivers of such GPUs do not say what is free, and not every PyTorch says which ones they are.
        integrated = getattr(properties, "is_integrated_gpu", None)
        self._integrated = self._told() is None if integrated is None else integrated
        if self._integrated:
            self.share = _CPU_SHARE

    def _free_and_total(self, used: MemoryUse) -> tuple[int, int]:
        free, total = self._told() or (max(0, self._total - used.reserved), self._total)
        return min(free, _free_on_host()) if self._integrated else free, total

    def _told(self) -> tuple[int, int] | None:
        try:
            free, total = torch.xpu.mem_get_info(self._device)
        except RuntimeError as error:
            if is_device_error(error):
                raise
            return None
        return free, total


class MpsMemory(HostMemory):
    """Memory of a Mac's GPU, which is the host's. Apple says how much of it a GPU should take at most.

    There are no counters of peaks.
    """

    taken_at_once = True

    def __init__(self) -> None:
        super().__init__(_CPU_SHARE)

    def free(self) -> int:
        used = self.used()
        free = min(torch.mps.recommended_max_memory() - used.reserved, _free_on_host())
        return max(0, free + used.reserved - used.allocated)

    def trim(self) -> None:
        torch.mps.empty_cache()

    def used(self) -> MemoryUse:
        return MemoryUse(torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory())


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
    if device.type == "xpu":
        return XpuMemory(device)
    if device.type == "mps":
        return MpsMemory()
    return HostMemory(_CPU_SHARE if device.type == "cpu" else _OTHER_SHARE)


# The allocators of a CPU and of MPS raise a plain RuntimeError, and so do libraries that take memory of their own.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
    "Invalid buffer size",  # a tensor larger than MPS allows
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
)
# Oldest supported versions of PyTorch have no class for the errors of a device.
_DEVICE_ERROR: tuple[type[BaseException], ...] = tuple(filter(None, [getattr(torch, "AcceleratorError", None)]))


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


def is_device_error(error: BaseException) -> bool:
    """Whether a device has failed. As a rule this process cannot use it any more: every attempt raises it again."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, _DEVICE_ERROR) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))
