"""Experts whose products have the same number of rows each, so that a token's result depends on no other token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..kernels.reference.experts_torch import gated, sum_of_shares
from .fixed_products import FixedThreads
from .fusable_experts import Experts, mixtures
from .fused_experts import tensors_of

Forward = Callable[..., Any]


def why_not_fixed(model: nn.Module) -> str | None:
    """Why the experts of a model cannot be run so, in words that say what stands in the way."""
    return next((each.why_not for each in mixtures(model) if each.why_not is not None), None)


def expert_forwards(model: nn.Module, rows: int, threads: FixedThreads) -> list[tuple[nn.Module, Forward]]:
    return [(each.module, _forward(each, rows, threads)) for each in mixtures(model)]


def _forward(found: Experts, rows: int, threads: FixedThreads) -> Forward:
    experts = found.module

    def forward(states: torch.Tensor, indices: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        (gate_up, gate_up_bias), (down, down_bias) = (
            tensors_of(experts, "gate_up_proj"),
            tensors_of(experts, "down_proj"),
        )
        made = states.new_zeros(indices.numel(), down.shape[1])  # [pairs, hidden]
        top, flat, gating = indices.shape[1], indices.flatten(), found.gating(experts)
        for expert in flat[(flat >= 0) & (flat < len(gate_up))].unique().tolist():
            for pairs in (flat == expert).nonzero()[:, 0].split(rows):
                x = states.new_zeros(rows, states.shape[1])
                x[: len(pairs)] = states[pairs // top]
                both = threads.in_several(functional.linear, x, gate_up[expert])
                inner = gated(both if gate_up_bias is None else both + gate_up_bias[expert], gating)
                result = threads.in_several(functional.linear, inner, down[expert])
                result = result if down_bias is None else result + down_bias[expert]
                made[pairs] = result[: len(pairs)].to(made.dtype)  # autocast gives another type
        return sum_of_shares(made, shares)

    return forward
