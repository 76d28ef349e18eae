"""Mamba-2's state space over spans, token by token, in plain PyTorch: the reference of ``state_space_triton``."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from ..lists.spans import Spans


def state_space(
    x: torch.Tensor,  # [tokens, heads, head_dim]
    dt: torch.Tensor,  # [tokens, heads]
    a: torch.Tensor,  # [heads] float32
    b: torch.Tensor,  # [tokens, groups, state_dim]; each group serves consecutive heads
    c: torch.Tensor,  # [tokens, groups, state_dim]
    d: torch.Tensor | None,  # [heads]
    dt_bias: torch.Tensor | None,  # [heads]
    states: torch.Tensor,  # [slots, heads, head_dim, state_dim] float32, written in place
    spans: Spans,
    softplus: bool = True,
    limit: tuple[float, float] = (0.0, math.inf),
) -> torch.Tensor:  # [tokens, heads, head_dim] float32
    """A state forgets by exp(a dt) and learns x dt under the key b; c reads it, and d lets x pass by."""
    step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    step = (functional.softplus(step) if softplus else step).clamp(*limit).float()
    shared = x.shape[1] // b.shape[1]
    x, b, c = x.float(), b.float().repeat_interleave(shared, 1), c.float().repeat_interleave(shared, 1)
    out, begin = torch.empty_like(x), spans.begin.tolist()
    if spans.single and len(spans) == len(x):
        state = spans.begun_with(states) * (a.float() * step).exp()[..., None, None]
        state += (x * step[..., None])[..., None] * b[:, :, None]
        spans.leave_in(states, state)
        out = (state * c[:, :, None]).sum(3)
        return out if d is None else out + d.float()[:, None] * x
    for span, (source, target) in enumerate(zip(spans.source.tolist(), spans.target.tolist(), strict=True)):
        state = states[source].clone() if source >= 0 else torch.zeros_like(states[0])
        for token in range(begin[span], begin[span + 1]):
            state *= (a.float() * step[token]).exp()[:, None, None]
            state += (x[token] * step[token, :, None])[:, :, None] * b[token, :, None]
            out[token] = (state * c[token, :, None]).sum(2)
        if target >= 0:
            states[target] = state
    return out if d is None else out + d.float()[:, None] * x
