"""Where float64 is: on the device, or on the host for devices that have none (Apple's, and some of Intel's)."""

from __future__ import annotations

from functools import cache

import torch

_HOST = torch.device("cpu")


@cache
def has_float64(device: torch.device) -> bool:
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def place_of_float64(device: torch.device) -> torch.device:
    """Where numbers of this device are worked out in float64."""
    return device if has_float64(device) else _HOST


def at_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where float64 is: itself, or a copy on the host."""
    return tensor.to(place_of_float64(tensor.device))


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers in float64, on the host where the device has none."""
    # The copy first: a device without float64 cannot convert.
    return at_float64(tensor).double()
