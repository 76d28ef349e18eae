"""Two rates of the machine, of large products and of a large copy, measured in the run whose floor they give."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from .timing import free_memory, synchronize

# By device, and for all others. A GPU slows down once its power budget is spent: that rate counts, hence the warm-up.
_WARM_UP_SECONDS = {"cuda": 2.0}
_MEASURED_SECONDS = {"cuda": 2.0}
_OTHER_SECONDS = 0.3
_PRODUCT = {"cuda": (4096, 4096, 14336)}  # rows, and the two sides of the matrix
_OTHER_PRODUCT = 512, 1024, 2816
_COPY_BYTES = {"cuda": 1 << 31}
_OTHER_COPY_BYTES = 1 << 27
_COPIES = 10


@dataclass(frozen=True)
class Rates:
    operations: float  # per second, of large matrix products back to back
    copy: float  # bytes read and written per second, by a large copy

    def __str__(self) -> str:
        return f"{_digits(self.operations / 1e12)} TFLOP/s and {_digits(self.copy / 1e12)} TB/s"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    free_memory(device)
    return Rates(product_rate(device, dtype), copy_rate(device))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of products between the two widths of an MLP, whose results do not fit into a cache."""
    rows, narrow, wide = _PRODUCT.get(device.type, _OTHER_PRODUCT)
    inputs = torch.randn(rows, narrow, device=device, dtype=dtype)
    there = torch.randn(narrow, wide, device=device, dtype=dtype) / narrow**0.5
    back = torch.randn(wide, narrow, device=device, dtype=dtype) / wide**0.5

    def batch() -> int:
        count = 50 if device.type == "cuda" else 1
        for _ in range(count):
            (inputs @ there) @ back
        synchronize(device)
        return count

    def rate_over(seconds: float) -> float:
        done, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds or not done:
            done += batch()
        return done * 4 * rows * narrow * wide / took if took else 0.0

    with torch.no_grad():
        rate_over(_WARM_UP_SECONDS.get(device.type, _OTHER_SECONDS))
        return rate_over(_MEASURED_SECONDS.get(device.type, _OTHER_SECONDS))


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a large copy."""
    size = _COPY_BYTES.get(device.type, _OTHER_COPY_BYTES)
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize(device)
    began = time.perf_counter()
    for _ in range(_COPIES):
        target.copy_(source)
    synchronize(device)
    return _COPIES * 2 * size / (time.perf_counter() - began)
