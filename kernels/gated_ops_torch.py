"""Plain PyTorch twins of ``gated_ops_triton``: the elementwise work of gated delta nets.

They round where the modules of transformers round.
"""

from __future__ import annotations

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


def norm_and_gate(
    x: torch.Tensor,  # [tokens, heads, dim]
    gate: torch.Tensor,  # [tokens, heads, dim]
    weight: torch.Tensor,  # [dim]
    eps: float,
) -> torch.Tensor:  # [tokens, heads, dim]
    """An RMSNorm of each head, times silu of the gate."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return ((weight * wide.to(x.dtype)) * functional.silu(gate.float())).to(x.dtype)
