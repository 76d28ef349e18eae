"""Two rates of the machine, measured in the run whose floor they give."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from .contenders import settled, tidied

_WARM = {"cuda": 2.0}  # seconds: a GPU slows down when its power budget is spent, and that rate counts
_MEASURED = {"cuda": 2.0}
_BRIEFLY = 0.3
_PRODUCT = {"cuda": (4096, 4096, 14336)}  # rows, and the two sides of the matrix
_SMALL_PRODUCT = 512, 1024, 2816
_COPY_BYTES = {"cuda": 1 << 31}
_SMALL_COPY = 1 << 27
_COPIES = 10


@dataclass(frozen=True)
class Rates:
    operations: float  # a second, of large matrix products back to back
    copy: float  # bytes read and written in a second, by a large copy

    def __str__(self) -> str:
        return f"{_digits(self.operations / 1e12)} TFLOP/s and {_digits(self.copy / 1e12)} TB/s"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    tidied(device)
    return Rates(_operations(device, dtype), _copy(device))


def _operations(device: torch.device, dtype: torch.dtype) -> float:
    """There and back between the two widths of an MLP, so that no result stays in a cache."""
    rows, narrow, wide = _PRODUCT.get(device.type, _SMALL_PRODUCT)
    inputs = torch.randn(rows, narrow, device=device, dtype=dtype)
    there = torch.randn(narrow, wide, device=device, dtype=dtype) / narrow**0.5
    back = torch.randn(wide, narrow, device=device, dtype=dtype) / wide**0.5

    def some() -> int:
        count = 50 if device.type == "cuda" else 1
        for _ in range(count):
            (inputs @ there) @ back
        settled(device)
        return count

    def during(seconds: float) -> float:
        done, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds or not done:
            done += some()
        return done * 4 * rows * narrow * wide / took if took else 0.0

    with torch.no_grad():
        during(_WARM.get(device.type, _BRIEFLY))
        return during(_MEASURED.get(device.type, _BRIEFLY))


def _copy(device: torch.device) -> float:
    size = _COPY_BYTES.get(device.type, _SMALL_COPY)
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    settled(device)
    began = time.perf_counter()
    for _ in range(_COPIES):
        target.copy_(source)
    settled(device)
    return _COPIES * 2 * size / (time.perf_counter() - began)
