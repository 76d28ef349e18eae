"""How precisely torch multiplies float32 matrices, as the process is set now.

``torch.get_float32_matmul_precision`` raises an error once one of torch's newer switches has been set
(``torch.backends.cuda.matmul.fp32_precision``), so it is not asked. The newer switches can always be read, and show
what the older ones have set, too.
"""

from __future__ import annotations

from typing import Any

import torch

_EXACT = ("none", "ieee")


def multiplies_exactly(device: torch.device) -> bool:
    """Whether products of float32 on this device are those of float32, not of a shorter type."""
    return _precision(device) in _EXACT


def matmul_settings(device: torch.device) -> tuple[object, ...]:
    """All that changes what a product gives: products made under other settings are others."""
    if device.type == "cpu":
        return (_precision(device),)
    products = torch.backends.cuda.matmul
    return (
        _precision(device),
        products.allow_bf16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction_split_k,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction_split_k,
        products.allow_fp16_accumulation,
        torch.backends.cuda.preferred_blas_library(),
    )


def _precision(device: torch.device) -> str:
    backend: Any = torch.backends.mkldnn if device.type == "cpu" else torch.backends.cuda
    precision: str = backend.matmul.fp32_precision
    return precision
