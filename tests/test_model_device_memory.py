"""The memory of Intel's and Apple's GPUs is sized by their own figures, which stand-ins give here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hf_batchllm.model.device_memory import MemoryUse, device_memory, is_out_of_memory

GIB = 1 << 30
XPU, MPS = torch.device("xpu", 0), torch.device("mps", 0)


def given(monkeypatch: pytest.MonkeyPatch, module: Any, **figures: Any) -> None:
    """The module's functions give these figures, or raise them. None: PyTorch has no such function."""
    for name, figure in figures.items():
        if figure is None:
            monkeypatch.delattr(module, name, raising=False)
        else:
            monkeypatch.setattr(module, name, gives(figure), raising=False)


def gives(figure: Any) -> Callable[..., Any]:
    def asked(*_: Any) -> Any:
        if isinstance(figure, Exception):
            raise figure
        return figure

    return asked


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(available=300 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)
    return found


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch, host: SimpleNamespace) -> SimpleNamespace:
    """16 GiB, of which 10 are free, 4 are held by PyTorch's allocator, and 3 are those of tensors."""
    found = SimpleNamespace(total_memory=16 * GIB, has_fp64=False, is_integrated_gpu=False)
    given(
        monkeypatch, torch.xpu, get_device_properties=found, mem_get_info=(10 * GIB, 16 * GIB),
        memory_allocated=3 * GIB, memory_reserved=4 * GIB, get_per_process_memory_fraction=1.0,
    )  # fmt: skip
    return found


UNTOLD = RuntimeError("The device (Intel(R) Graphics) doesn't support querying the available free memory.")


# Figures of the GPU and of its allocator, whether it is a part of the processor, what the host has; and what is free.
SIZES: list[tuple[dict[str, Any], bool | None, int, int]] = [
    ({}, False, 300, 11),  # the free ones, and what the allocator holds without need
    ({}, False, 1, 11),
    ({"get_per_process_memory_fraction": 0.5}, False, 300, 5),
    ({"get_per_process_memory_fraction": None}, False, 300, 11),
    ({"mem_get_info": UNTOLD}, False, 300, 13),  # all that this process has not taken
    ({"mem_get_info": UNTOLD}, True, 300, 13),
    ({"mem_get_info": UNTOLD}, True, 2, 3),  # the host has no more
    ({"mem_get_info": UNTOLD}, None, 300, 13),  # it does not say of what it is a part
    ({"mem_get_info": UNTOLD}, None, 2, 3),
]


@pytest.mark.parametrize(("figures", "integrated", "available", "free"), SIZES)
def test_what_is_free_on_xpu(
    figures: dict[str, Any], integrated: bool | None, available: int, free: int,
    xpu: SimpleNamespace, host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given(monkeypatch, torch.xpu, **figures)
    host.available, xpu.is_integrated_gpu = available * GIB, integrated
    if integrated is None:
        del xpu.is_integrated_gpu
    memory = device_memory(XPU)
    assert memory.free() == free * GIB
    assert memory.used() == MemoryUse(3 * GIB, 4 * GIB) and memory.taken_at_once
    assert memory.share == (0.9 if integrated is False else 0.5), "other programs need the host's memory, too"


def test_a_lost_xpu_is_no_xpu_that_says_nothing(xpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = torch.AcceleratorError("device lost")
    given(monkeypatch, torch.xpu, mem_get_info=lost)
    with pytest.raises(torch.AcceleratorError):
        device_memory(XPU).free()


def test_peaks_of_xpu_between_marks(xpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[Any] = []
    monkeypatch.setattr(torch.xpu, "reset_peak_memory_stats", resets.append)
    given(monkeypatch, torch.xpu, max_memory_allocated=7, max_memory_reserved=9)
    memory = device_memory(XPU)
    memory.start()
    memory.mark()
    assert memory.peak() == MemoryUse(7, 9)
    given(monkeypatch, torch.xpu, max_memory_allocated=5)
    assert memory.highest() == 7 and resets == [XPU, XPU]


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch, host: SimpleNamespace) -> None:
    """A GPU should take 24 GiB at most; Metal has given out 8, and 6 are those of tensors."""
    given(
        monkeypatch, torch.mps, recommended_max_memory=24 * GIB, driver_allocated_memory=8 * GIB,
        current_allocated_memory=6 * GIB,
    )  # fmt: skip


def test_mps_takes_what_apple_recommends_or_what_the_host_has(mps: None, host: SimpleNamespace) -> None:
    memory = device_memory(MPS)
    assert memory.free() == 18 * GIB
    host.available = 5 * GIB
    assert memory.free() == 7 * GIB, "those that the allocator holds without need are not free for others"
    assert memory.used() == MemoryUse(6 * GIB, 8 * GIB)
    assert memory.taken_at_once and memory.share == 0.5
    memory.start()
    memory.mark()
    assert memory.highest() == 0, "nobody counts peaks"


def test_mps_beyond_what_apple_recommends(mps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, torch.mps, recommended_max_memory=3 * GIB)
    assert device_memory(MPS).free() == 0


def test_they_get_back_what_no_tensor_uses(xpu: None, mps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[str] = []
    monkeypatch.setattr(torch.xpu, "empty_cache", lambda: trimmed.append("xpu"))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: trimmed.append("mps"))
    device_memory(XPU).trim()
    device_memory(MPS).trim()
    assert trimmed == ["xpu", "mps"]


@pytest.mark.parametrize(
    "said",
    [
        "MPS backend out of memory (MPS allocated: 8.89 GB, other allocations: 172.98 MB, max allowed: 9.07 GB).",
        "Invalid buffer size: 19.38 GiB",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    ],
)
def test_their_words_for_memory_that_ran_out(said: str) -> None:
    assert is_out_of_memory(RuntimeError(said))
