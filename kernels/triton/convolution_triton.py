"""Causal short convolutions over spans, channel by channel; the references are in ``convolution_torch``.

A block computes some channels of some tokens. What came before a span lies in its slot. The slots are brought up to
date by a second kernel, as blocks of the first may still read them. Where each span is a single token, one block has
all that a slot says of its channels, and the first kernel does both.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl

from ..lists.spans import Spans
from ..reference.convolution_torch import ACTIVATIONS

_TOKENS, _CHANNELS = 16, 128  # of a block


@triton.jit
def _inputs(
    x, states, source, at, begin, channel, inside, x_token, x_channel, CHANNELS: tl.constexpr, BEFORE: tl.constexpr
):  # fmt: skip
    """What a sequence had at its token ``at``: of this span, or of its slot."""
    here = at >= begin
    new = tl.load(x + at.to(tl.int64) * x_token + channel * x_channel, mask=inside & here, other=0.0)
    place = (source.to(tl.int64) * BEFORE + BEFORE + at - begin) * CHANNELS + channel
    old = tl.load(states + place, mask=inside & (here == 0) & (source >= 0), other=0.0)
    return tl.where(here, new, old.to(new.dtype))


@triton.jit(do_not_specialize=["tokens"])
def _short_convolution(
    x, weight, bias, states, out, begins, sources, targets, of_token,
    tokens, x_token, x_channel,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, SINGLE: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    BEFORE: tl.constexpr = TAPS - 1
    TYPE: tl.constexpr = weight.dtype.element_ty
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (token < tokens) & (channel < CHANNELS)
    span = tl.load(of_token + token, mask=token < tokens, other=0)
    begin, source = tl.load(begins + span), tl.load(sources + span)
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        seen = _inputs(
            x, states, source, token - BEFORE + tap, begin, channel, inside, x_token, x_channel, CHANNELS, BEFORE
        )
        factor = tl.load(weight + channel * TAPS + tap, mask=channel < CHANNELS, other=0.0)
        total += seen.to(TYPE).to(tl.float32) * factor.to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    total = total.to(TYPE).to(tl.float32)
    if SILU:
        total = (total / (1 + tl.exp(-total))).to(TYPE).to(tl.float32)
    tl.store(out + token.to(tl.int64) * CHANNELS + channel, total.to(out.dtype.element_ty), mask=inside)
    if SINGLE:
        target = tl.load(targets + span, mask=token < tokens, other=-1)
        for nth in tl.static_range(BEFORE):  # each is overwritten after it was read for the place before it
            seen = _inputs(
                x,
                states,
                source,
                token + 1 - BEFORE + nth,
                begin,
                channel,
                inside,
                x_token,
                x_channel,
                CHANNELS,
                BEFORE,
            )
            place = (target.to(tl.int64) * BEFORE + nth) * CHANNELS + channel
            tl.store(states + place, seen.to(states.dtype.element_ty), mask=inside & (target >= 0))


@triton.jit
def _keep_inputs(
    x, states, begins, sources, targets, x_token, x_channel,
    CHANNELS: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(begins + span), tl.load(begins + span + 1)
    source, target = tl.load(sources + span), tl.load(targets + span)
    inside = (channel < CHANNELS) & (target >= 0)
    for nth in tl.static_range(BEFORE):  # each is overwritten after it was read for the place before it
        seen = _inputs(
            x, states, source, end - BEFORE + nth, begin, channel, inside, x_token, x_channel, CHANNELS, BEFORE
        )
        place = (target.to(tl.int64) * BEFORE + nth) * CHANNELS + channel
        tl.store(states + place, seen.to(states.dtype.element_ty), mask=inside)


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    spans: Spans,
    activation: str | None = None,
) -> torch.Tensor:
    if activation not in ACTIVATIONS:
        raise ValueError(f"there is no kernel for the activation {activation!r}")
    tokens, channels = x.shape
    taps = weight.shape[1]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    assert states.is_contiguous() and states.shape[1:] == (taps - 1, channels)
    single = spans.single and len(spans) == tokens  # an empty span has no block of its own
    blocks = triton.cdiv(channels, _CHANNELS)
    if tokens:
        _short_convolution[(triton.cdiv(tokens, _TOKENS), blocks)](
            x, weight, bias, states, out, spans.begin, spans.source, spans.target, spans.of_token,
            tokens, *x.stride(),
            CHANNELS=channels, TAPS=taps, SILU=activation == "silu", SINGLE=single, TOKENS=_TOKENS, BLOCK=_CHANNELS,
        )  # fmt: skip
    if not single and taps > 1:
        _keep_inputs[(len(spans), blocks)](
            x, states, spans.begin, spans.source, spans.target, *x.stride(),
            CHANNELS=channels, BEFORE=taps - 1, BLOCK=_CHANNELS,
        )  # fmt: skip
    return out
