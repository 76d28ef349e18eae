"""Experts whose products have the same number of rows each, so that a token's result depends on no other token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..kernels.experts_torch import gated, sum_of_shares
from .fixed_products import FixedThreads
from .fusable_experts import Experts, mixtures
from .fused_experts import tensors_of

Forward = Callable[..., Any]


def why_not_fixed(model: nn.Module) -> str | None:
    """Why the experts of a model cannot be run so, in words that say what stands in the way."""
    return next((each.why_not for each in mixtures(model) if each.why_not is not None), None)


class FixedExperts:
    """``restore`` may be called again and again: an interrupt may come in the midst of it."""

    def __init__(self, model: nn.Module, rows: int, threads: FixedThreads) -> None:
        self._forwards = [(each.module, _forward(each, rows, threads)) for each in mixtures(model)]
        self._before: list[tuple[nn.Module, Forward | None]] = []

    @contextmanager
    def applied(self) -> Iterator[None]:
        for module, forward in self._forwards:
            self._before.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        while self._before:
            module, before = self._before[-1]
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before
            self._before.pop()


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
