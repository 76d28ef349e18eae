"""Mamba-1's selective scan over spans, token by token; the reference is in ``selective_scan_torch``.

A block keeps the states of some channels in registers and walks through the tokens of a span. Channels do not look at
each other, so a slot may be read and written by the same launch.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl

from ..lists.spans import Spans
from .time_step_triton import time_step

_CHANNELS = 32  # of a block; the state of a channel is small, and so one warp keeps them all


@triton.jit
def _selective_scan(
    x, dt, a, b, c, d, z, dt_bias, states, out, begins, sources, targets,
    x_token, dt_token, b_token, c_token, z_token,
    CHANNELS: tl.constexpr, STATE_DIM: tl.constexpr, SOFTPLUS: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = tl.arange(0, STATES)
    inside, known = channel < CHANNELS, key < STATE_DIM
    begin, end = tl.load(begins + span), tl.load(begins + span + 1)
    source, target = tl.load(sources + span).to(tl.int64), tl.load(targets + span).to(tl.int64)
    place = channel[:, None] * STATE_DIM + key[None, :]
    there = inside[:, None] & known[None, :]
    state = tl.load(states + source * (CHANNELS * STATE_DIM) + place, mask=there & (source >= 0), other=0.0)
    rate = tl.load(a + place, mask=there, other=0.0).to(tl.float32)
    bias = None if dt_bias is None else tl.load(dt_bias + channel, mask=inside, other=0.0)
    if d is not None:
        passes = tl.load(d + channel, mask=inside, other=0.0).to(tl.float32)
    first = begin.to(tl.int64)
    x += first * x_token
    dt += first * dt_token
    b += first * b_token
    c += first * c_token
    out += first * CHANNELS
    if z is not None:
        z += first * z_token
    for _ in range(end - begin):
        step = time_step(tl.load(dt + channel, mask=inside, other=0.0), bias, SOFTPLUS)
        given = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
        learns = tl.load(b + key, mask=known, other=0.0).to(tl.float32)
        reads = tl.load(c + key, mask=known, other=0.0).to(tl.float32)
        state = state * tl.exp(rate * step[:, None]) + (given * step)[:, None] * learns[None, :]
        read = tl.sum(state * reads[None, :], 1)
        if d is not None:
            read += passes * given
        if z is not None:
            gate = tl.load(z + channel, mask=inside, other=0.0).to(tl.float32)
            read *= gate / (1 + tl.exp(-gate))
            z += z_token
        tl.store(out + channel, read, mask=inside)
        x += x_token
        dt += dt_token
        b += b_token
        c += c_token
        out += CHANNELS
    tl.store(states + target * (CHANNELS * STATE_DIM) + place, state, mask=there & (target >= 0))


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    states: torch.Tensor,
    spans: Spans,
    softplus: bool = True,
) -> torch.Tensor:
    # Transformers computes dt with its tokens side by side: read so, each channel would be a cache line of its own.
    x, dt, b, c = (each if each.stride(1) == 1 else each.contiguous() for each in (x, dt, b, c))
    z = z if z is None or z.stride(1) == 1 else z.contiguous()
    d, dt_bias = (None if each is None else each.contiguous() for each in (d, dt_bias))
    (tokens, channels), state_dim = x.shape, b.shape[1]
    out = torch.empty((tokens, channels), dtype=torch.float32, device=x.device)
    assert states.is_contiguous() and states.shape[1:] == (channels, state_dim)
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    _selective_scan[(len(spans), triton.cdiv(channels, block))](
        x, dt, a.contiguous(), b, c, d, z, dt_bias, states, out, spans.begin, spans.source, spans.target,
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), 0 if z is None else z.stride(0),
        CHANNELS=channels, STATE_DIM=state_dim, SOFTPLUS=softplus,
        STATES=triton.next_power_of_2(state_dim), BLOCK=block, num_warps=1,
    )  # fmt: skip
    return out
