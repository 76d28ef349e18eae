"""The plain PyTorch reference of ``narrow_products_triton``: same signature, same results but for rounding."""

from __future__ import annotations

import torch


def narrow_product(
    x: torch.Tensor,  # [rows, depth]
    weight: torch.Tensor,  # [columns, depth]
    bias: torch.Tensor | None = None,  # [columns]
) -> torch.Tensor:  # [rows, columns]
    made = x.double() @ weight.double().T
    return (made if bias is None else made + bias.double()).to(x.dtype)
