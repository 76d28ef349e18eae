"""Mamba-2's state space over spans; the reference is in ``state_space_torch``.

Here the walk is token by token: a block keeps some rows of one head's state in registers and walks through the tokens
of a span. Rows do not look at each other, so a slot may be read and written by the same launch.

Prompts are walked through in chunks, see ``state_space_chunks_triton``.
"""

from __future__ import annotations

import math

import torch

import triton
import triton.language as tl

from ..lists.spans import Spans
from .state_space_chunks_triton import state_space_in_chunks
from .time_step_triton import limited_time_step

_ROWS = 32  # of a block


@triton.jit
def _state_space(
    x, dt, a, b, c, d, dt_bias, states, out, begins, sources, targets,
    x_token, x_head, dt_token, dt_head, b_token, b_group, c_token, c_group, least, most,
    HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, SOFTPLUS: tl.constexpr,
    STATES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    span, head = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    key = tl.arange(0, STATES)
    inside, known = row < HEAD_DIM, key < STATE_DIM
    begin, end = tl.load(begins + span), tl.load(begins + span + 1)
    source, target = tl.load(sources + span).to(tl.int64), tl.load(targets + span).to(tl.int64)
    place = head * (HEAD_DIM * STATE_DIM) + row[:, None] * STATE_DIM + key[None, :]
    there = inside[:, None] & known[None, :]
    state = tl.load(states + source * (HEADS * HEAD_DIM * STATE_DIM) + place, mask=there & (source >= 0), other=0.0)
    rate = tl.load(a + head).to(tl.float32)
    bias = None if dt_bias is None else tl.load(dt_bias + head)
    first = begin.to(tl.int64)
    x += first * x_token + head * x_head
    dt += first * dt_token + head * dt_head
    b += first * b_token + head // SHARED * b_group
    c += first * c_token + head // SHARED * c_group
    out += (first * HEADS + head) * HEAD_DIM
    for _ in range(end - begin):
        step = limited_time_step(tl.load(dt), bias, least, most, SOFTPLUS)
        given = tl.load(x + row, mask=inside, other=0.0).to(tl.float32)
        learns = tl.load(b + key, mask=known, other=0.0).to(tl.float32)
        reads = tl.load(c + key, mask=known, other=0.0).to(tl.float32)
        state = state * tl.exp(rate * step) + (given * step)[:, None] * learns[None, :]
        read = tl.sum(state * reads[None, :], 1)
        if d is not None:
            read += tl.load(d + head).to(tl.float32) * given
        tl.store(out + row, read, mask=inside)
        x += x_token
        dt += dt_token
        b += b_token
        c += c_token
        out += HEADS * HEAD_DIM
    tl.store(states + target * (HEADS * HEAD_DIM * STATE_DIM) + place, state, mask=there & (target >= 0))


def state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    states: torch.Tensor,
    spans: Spans,
    softplus: bool = True,
    limit: tuple[float, float] = (0.0, math.inf),
) -> torch.Tensor:
    x, b, c = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, b, c))
    a, d, dt_bias = a.contiguous(), *(None if each is None else each.contiguous() for each in (d, dt_bias))
    tokens, heads, head_dim = x.shape
    state_dim = b.shape[2]
    assert states.is_contiguous() and states.shape[1:] == (heads, head_dim, state_dim)
    # In float32 products of matrices take longer than the walk.
    if not spans.single and x.dtype.itemsize == 2 and x.dtype == b.dtype == c.dtype:
        return state_space_in_chunks(x, dt, a, b, c, d, dt_bias, states, spans, softplus, limit)
    out = torch.empty((tokens, heads, head_dim), dtype=torch.float32, device=x.device)
    rows = min(_ROWS, triton.next_power_of_2(head_dim))
    _state_space[(len(spans), heads, triton.cdiv(head_dim, rows))](
        x, dt, a, b, c, d, dt_bias, states, out, spans.begin, spans.source, spans.target,
        *x.stride()[:2], *dt.stride(), *b.stride()[:2], *c.stride()[:2], *map(float, limit),
        HEADS=heads, SHARED=heads // b.shape[1], HEAD_DIM=head_dim, STATE_DIM=state_dim, SOFTPLUS=softplus,
        STATES=triton.next_power_of_2(state_dim), ROWS=rows,
    )  # fmt: skip
    return out
