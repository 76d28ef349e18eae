"""Plain PyTorch references of ``gated_ops_triton``: the elementwise work of layers that carry a state.

They round where the modules of transformers round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


def decay_and_beta(
    a: torch.Tensor,  # [tokens, heads]
    b: torch.Tensor,  # [tokens, heads]
    a_log: torch.Tensor,  # [heads]
    dt_bias: torch.Tensor,  # [heads]
) -> tuple[torch.Tensor, torch.Tensor]:  # [tokens, heads] float32, [tokens, heads]
    """How much of a state each token forgets, as a logarithm, and how far it moves the state."""
    return -a_log.float().exp() * functional.softplus(a.float() + dt_bias), b.sigmoid()


@dataclass(frozen=True)
class NormForm:
    """What a module does with its gate, and in which precision."""

    gate_first: bool = False  # the gate opens before the norm is taken, in float32
    rounds: bool = True  # the norm is rounded before it meets the weight, otherwise nothing is before the end
    activation: str = "silu"  # or "sigmoid", of the gate


def gated_norm(
    x: torch.Tensor,  # [tokens, parts, dim]
    gate: torch.Tensor,  # [tokens, parts, dim]
    weight: torch.Tensor,  # [dim], or [parts * dim]
    eps: float,
    form: NormForm,
) -> torch.Tensor:  # [tokens, parts, dim]
    """An RMSNorm of each part, with a gate before it or behind it."""
    weight = weight if len(weight) == x.shape[-1] else weight.view(x.shape[1:])
    opened = functional.silu(gate.float()) if form.activation == "silu" else gate.float().sigmoid()
    wide = x.float() * opened if form.gate_first else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    scaled = weight * wide.to(x.dtype) if form.rounds else weight.float() * wide
    if form.gate_first:
        return scaled if form.rounds else scaled.to(x.dtype)
    return (scaled * opened).to(x.dtype)
