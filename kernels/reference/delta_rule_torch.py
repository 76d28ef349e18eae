"""The gated delta rule over spans, token by token, in plain PyTorch: the reference of ``delta_rule_triton``."""

from __future__ import annotations

import torch

from ..lists.spans import Spans

EPS = 1e-6  # of the norm of queries and keys


def delta_rule(
    q: torch.Tensor,  # [tokens, heads, key_dim]
    k: torch.Tensor,  # [tokens, heads, key_dim]
    v: torch.Tensor,  # [tokens, value_heads, value_dim]; each head of q and k serves consecutive value heads
    decay: torch.Tensor,  # [tokens, value_heads], or [tokens, value_heads, key_dim]: logarithms
    beta: torch.Tensor,  # [tokens, value_heads]
    states: torch.Tensor,  # [slots, value_heads, key_dim, value_dim] float32, written in place
    spans: Spans,
    normalise: bool = False,
) -> torch.Tensor:  # [tokens, value_heads, value_dim]
    """A state forgets by ``decay``, then what it knows of k moves towards v by ``beta``; q reads it."""
    shared = v.shape[1] // q.shape[1]
    q, k = (x.float().repeat_interleave(shared, 1) for x in (q, k))
    if normalise:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    decay = decay.float().exp()
    decay = decay[..., None, None] if decay.ndim == 2 else decay[..., None]  # [tokens, value_heads, 1 or key_dim, 1]
    if spans.single and len(spans) == len(v):
        state, key = spans.begun_with(states) * decay, k[..., None]
        change = (v.float() - (state * key).sum(2)) * beta.float()[..., None]
        state += key * change[:, :, None]
        spans.leave_in(states, state)
        return (state * q[..., None]).sum(2).to(v.dtype)
    out, begin = torch.empty_like(v), spans.begin.tolist()
    for span, (source, target) in enumerate(zip(spans.source.tolist(), spans.target.tolist(), strict=True)):
        state = states[source].clone() if source >= 0 else torch.zeros_like(states[0])
        for token in range(begin[span], begin[span + 1]):
            key = k[token, :, :, None]
            state *= decay[token]
            change = (v[token].float() - (state * key).sum(1)) * beta[token].float()[:, None]
            state += key * change[:, None]
            out[token] = (state * q[token, :, :, None]).sum(1).to(out.dtype)
        if target >= 0:
            states[target] = state
    return out
