"""Mamba-1's selective scan over spans, token by token, in plain PyTorch: the reference of ``selective_scan_triton``."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..lists.spans import Spans

_VALUES_AT_ONCE = 1 << 18  # of states that stand side by side, token by token: more would leave the cache of a core


def selective_scan(
    x: torch.Tensor,  # [tokens, channels]
    dt: torch.Tensor,  # [tokens, channels]
    a: torch.Tensor,  # [channels, state_dim] float32
    b: torch.Tensor,  # [tokens, state_dim]
    c: torch.Tensor,  # [tokens, state_dim]
    d: torch.Tensor | None,  # [channels]
    z: torch.Tensor | None,  # [tokens, channels]
    dt_bias: torch.Tensor | None,  # [channels]
    states: torch.Tensor,  # [slots, channels, state_dim] float32, written in place
    spans: Spans,
    softplus: bool = True,
) -> torch.Tensor:  # [tokens, channels] float32
    """A state forgets by exp(a dt) and learns x dt under the key b; c reads it, d lets x pass by, and z is a gate.

    Steps of time are rounded as transformers rounds them. States are not, nor what is read of them: transformers rounds
    both to the type of ``x``, the kernels of mamba-ssm do not.
    """
    step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    step = (functional.softplus(step) if softplus else step).float()
    a, given, b, c = a.float(), x.float(), b.float(), c.float()
    if spans.single and len(spans) == len(x):
        state = spans.begun_with(states) * (a * step[:, :, None]).exp()
        state += (given * step)[:, :, None] * b[:, None]
        spans.leave_in(states, state)
        out = (state * c[:, None]).sum(2)
    else:
        out = torch.empty_like(given)
        few, begin = max(1, _VALUES_AT_ONCE // a.numel()), spans.begin.tolist()
        for span, (source, target) in enumerate(zip(spans.source.tolist(), spans.target.tolist(), strict=True)):
            state = states[source] if source >= 0 else torch.zeros_like(states[0])
            for first in range(begin[span], begin[span + 1], few):
                part = slice(first, min(first + few, begin[span + 1]))
                keeps = (a * step[part, :, None]).exp()
                after = (given[part] * step[part])[:, :, None] * b[part, None]  # [tokens, channels, state_dim]
                for kept, learnt in zip(keeps, after, strict=True):
                    state = learnt.addcmul_(kept, state)
                out[part] = (after @ c[part, :, None])[:, :, 0]
            if target >= 0:
                states[target] = state
    if d is not None:
        out += d.float() * given
    return out if z is None else out * functional.silu(z.float())
