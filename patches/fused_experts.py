"""The forwards that mixtures of experts and their routers run in place of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..kernels.reference.routing_torch import RowsOfExperts
from .all_reduced_rows import AllReduce
from .fusable_experts import Experts
from .routers import Router
from .sharded_modules import adds_up_experts, around, local

Forward = Callable[..., Any]


@dataclass(frozen=True)
class ExpertKernels:
    """The kernels, in Triton or as their references in PyTorch."""

    choose: Callable[..., Any]
    rows_of_experts: Callable[..., RowsOfExperts]
    up_products: Callable[..., torch.Tensor]
    down_products: Callable[..., torch.Tensor]
    sum_of_shares: Callable[..., torch.Tensor]
    rows_of_a_tile: Callable[[int, int, torch.dtype], int]  # of pairs, experts, type


class Handed:
    """What a router's kernel has found out about its choice, for the experts that are called next with it."""

    def __init__(self) -> None:
        self._left: tuple[torch.Tensor, RowsOfExperts] | None = None

    def leave(self, indices: torch.Tensor, rows: RowsOfExperts) -> None:
        self._left = indices, rows

    def take(self, indices: torch.Tensor) -> RowsOfExperts | None:
        left, self._left = self._left, None
        return left[1] if left is not None and left[0] is indices else None


def experts_forward(
    found: Experts, kernels: ExpertKernels, handed: Handed, all_reduce: AllReduce | None = None
) -> Forward:
    """``sums``: of ranks each of which has a part of all experts."""
    experts = found.module
    in_parts = adds_up_experts(experts)
    own: Forward = partial(type(experts).forward, experts)
    if in_parts:
        own = around(experts, own)

    def forward(*given: Any, **named: Any) -> torch.Tensor:
        gate_up, gate_up_bias = tensors_of(experts, "gate_up_proj")  # read once: an adapter may compute it
        if named or len(given) != 3 or given[0].ndim != 2 or given[0].dtype != gate_up.dtype:
            unusual: torch.Tensor = own(*given, **named)
            return unusual
        states, indices, shares = given  # [tokens, hidden], [tokens, top], [tokens, top]
        down, down_bias = tensors_of(experts, "down_proj")
        top, count = indices.shape[1], len(gate_up)
        rows = handed.take(indices) if found.is_handed_on and not experts._forward_pre_hooks else None
        if rows is None:
            tile = kernels.rows_of_a_tile(indices.numel(), count, states.dtype)
            rows = kernels.rows_of_experts(indices, count, tile)
        made = kernels.up_products(states.contiguous(), gate_up, gate_up_bias, rows, top, found.gating(experts))
        total = kernels.sum_of_shares(kernels.down_products(made, down, down_bias, rows), shares)
        return all_reduce.total(total) if in_parts and all_reduce is not None else total

    return around(experts, forward) if in_parts and all_reduce is None else forward


def tensors_of(experts: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A stack of weights as [experts, out, in], and its biases."""
    weight = local(getattr(experts, name))
    return weight.transpose(1, 2) if experts.is_transposed else weight, getattr(experts, f"{name}_bias", None)


def router_forward(router: Any, known: Router, kernels: ExpertKernels, handed: Handed) -> Forward:
    own = type(router).forward
    indices_first = known.indices_first(router)

    def forward(hidden_states: torch.Tensor, *given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        states = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits, rule = known.logits(router, states), known.rule(router)
        experts = logits.shape[1]
        if named or not known.fits(router) or not rule.fits(experts):
            unusual: tuple[torch.Tensor, ...] = own(router, hidden_states, *given, **named)
            return unusual
        (indices, shares), rows = kernels.choose(
            logits,
            rule,
            kernels.rows_of_a_tile(len(logits) * rule.top, experts, states.dtype),
            known.dtype(states, logits),
            bias=known.bias(router, *given),
            scales=known.scales(router),
        )
        if not router._forward_hooks:  # they may change the indices in place
            handed.leave(indices, rows)
        if indices_first:
            return indices, shares, logits
        return logits.softmax(-1, torch.float32) if known.gives == "probabilities" else logits, shares, indices

    return forward
