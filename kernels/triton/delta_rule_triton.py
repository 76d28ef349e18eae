"""The gated delta rule over spans; the reference is in ``delta_rule_torch``.

Here the walk is token by token: a block keeps some columns of one head's state in registers and walks through the
tokens of a span. Columns do not look at each other, so a slot may be read and written by the same launch.

Prompts are walked through in chunks, see ``delta_rule_chunks_triton``. Decays by key do not part into a factor of each
token without overflow, so for them prompts, too, go token by token.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl

from ..lists.spans import Spans
from ..reference.delta_rule_torch import EPS
from .delta_rule_chunks_triton import delta_rule_in_chunks

_EPS = tl.constexpr(EPS)
_COLUMNS = 32  # of a block


@triton.jit
def _delta_rule(
    q, k, v, decay, beta, states, out, begins, sources, targets,
    q_token, q_head, k_token, k_head, v_token, v_head, decay_token, decay_head, beta_token, beta_head, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BY_KEY: tl.constexpr, NORMALISE: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    span, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    key = tl.arange(0, KEYS)
    known, inside = key < KEY_DIM, column < VALUE_DIM
    begin, end = tl.load(begins + span), tl.load(begins + span + 1)
    source, target = tl.load(sources + span).to(tl.int64), tl.load(targets + span).to(tl.int64)
    place = head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + column[None, :]
    there = known[:, None] & inside[None, :]
    state = tl.load(states + source * (HEADS * KEY_DIM * VALUE_DIM) + place, mask=there & (source >= 0), other=0.0)
    first = begin.to(tl.int64)
    q += first * q_token + head // SHARED * q_head
    k += first * k_token + head // SHARED * k_head
    v += first * v_token + head * v_head
    decay += first * decay_token + head * decay_head
    beta += first * beta_token + head * beta_head
    out += (first * HEADS + head) * VALUE_DIM
    for _ in range(end - begin):
        query = tl.load(q + key, mask=known, other=0.0).to(tl.float32)
        keyed = tl.load(k + key, mask=known, other=0.0).to(tl.float32)
        if NORMALISE:
            query = query * tl.rsqrt(tl.sum(query * query, 0) + _EPS)
            keyed = keyed * tl.rsqrt(tl.sum(keyed * keyed, 0) + _EPS)
        if BY_KEY:
            state = state * tl.exp(tl.load(decay + key, mask=known, other=0.0).to(tl.float32))[:, None]
        else:
            state = state * tl.exp(tl.load(decay).to(tl.float32))
        value = tl.load(v + column, mask=inside, other=0.0).to(tl.float32)
        change = (value - tl.sum(state * keyed[:, None], 0)) * tl.load(beta).to(tl.float32)
        state = state + keyed[:, None] * change[None, :]
        read = tl.sum(state * (query * scale)[:, None], 0)
        tl.store(out + column, read.to(out.dtype.element_ty), mask=inside)
        q += q_token
        k += k_token
        v += v_token
        decay += decay_token
        beta += beta_token
        out += HEADS * VALUE_DIM
    tl.store(states + target * (HEADS * KEY_DIM * VALUE_DIM) + place, state, mask=there & (target >= 0))


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    spans: Spans,
    normalise: bool = False,
) -> torch.Tensor:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    tokens, heads, value_dim = v.shape
    key_dim = q.shape[2]
    by_key = decay.ndim == 3
    assert states.is_contiguous() and states.shape[1:] == (heads, key_dim, value_dim)
    if not spans.single and not by_key:
        return delta_rule_in_chunks(q, k, v, decay, beta, states, spans, normalise)
    out = torch.empty((tokens, heads, value_dim), dtype=v.dtype, device=v.device)
    decay = decay.contiguous() if by_key else decay
    keys, columns = max(16, triton.next_power_of_2(key_dim)), max(16, min(_COLUMNS, triton.next_power_of_2(value_dim)))
    _delta_rule[len(spans), heads, triton.cdiv(value_dim, columns)](
        q, k, v, decay, beta, states, out, spans.begin, spans.source, spans.target,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *decay.stride()[:2], *beta.stride(), key_dim**-0.5,
        HEADS=heads, SHARED=heads // q.shape[1], KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BY_KEY=by_key, NORMALISE=normalise, KEYS=keys, COLUMNS=columns,
    )  # fmt: skip
    return out
