"""Causal short convolutions over spans, channel by channel, in plain PyTorch: references of ``convolution_triton``."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..lists.spans import Spans

ACTIVATIONS = (None, "silu")


def short_convolution(
    x: torch.Tensor,  # [tokens, channels]
    weight: torch.Tensor,  # [channels, taps]  the last one is of the token itself
    bias: torch.Tensor | None,  # [channels]
    states: torch.Tensor,  # [slots, taps - 1, channels]  the latest inputs of each sequence, written in place
    spans: Spans,
    activation: str | None = None,
) -> torch.Tensor:  # [tokens, channels]
    """Each token with the inputs of the tokens before it in its sequence; zeros stand before a sequence."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"there is no kernel for the activation {activation!r}")
    out, before = torch.empty_like(x), weight.shape[1] - 1
    if spans.single and len(spans) == len(x):
        seen = torch.cat([spans.begun_with(states).to(x.dtype), x[:, None]], 1).mT  # [tokens, channels, taps]
        made = functional.conv1d(seen.to(weight.dtype), weight[:, None], bias, groups=len(weight))[:, :, 0]
        spans.leave_in(states, seen[:, :, 1:].mT)
        return (made if activation is None else functional.silu(made)).to(x.dtype)
    begin = spans.begin.tolist()
    for span, (source, target) in enumerate(zip(spans.source.tolist(), spans.target.tolist(), strict=True)):
        mine = slice(begin[span], begin[span + 1])
        past = states[source] if source >= 0 else states.new_zeros(states.shape[1:])
        seen = torch.cat([past.to(x.dtype), x[mine]]).T  # [channels, taps - 1 + tokens of the span]
        if mine.stop > mine.start:
            made = functional.conv1d(seen.to(weight.dtype)[None], weight[:, None], bias, groups=len(weight))[0]
            out[mine] = (made if activation is None else functional.silu(made)).T.to(x.dtype)
        if target >= 0:
            states[target] = seen[:, seen.shape[1] - before :].T
    return out
