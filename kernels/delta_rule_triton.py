"""The gated delta rule over spans, token by token; the twin is in ``delta_rule_torch``.

A block keeps some columns of one head's state in registers and walks through the tokens of a span. Columns do not look
at each other, so a slot may be read and written by the same launch.

Prompts are walked through in chunks. Within a chunk each token's change depends on the changes before it, through the
products of keys: a small triangular system, the same for all columns, which is solved row by row. What the state gives
to all tokens of the chunk, and what they give to the state, are products of matrices then. Decays by key do not part
into a factor of each token without overflow, so there the walk is token by token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .delta_rule_torch import EPS
from .spans import Spans

_EPS = tl.constexpr(EPS)
_COLUMNS = 32  # of a block
_CHUNK = 16  # tokens: the least that a product of matrices takes


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


@triton.jit
def _delta_rule_in_chunks(
    q, k, v, decay, beta, states, out, begins, sources, targets,
    q_token, q_head, k_token, k_head, v_token, v_head, decay_token, decay_head, beta_token, beta_head, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, NORMALISE: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    span, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    key, nth = tl.arange(0, KEYS), tl.arange(0, CHUNK)
    known, inside = key < KEY_DIM, column < VALUE_DIM
    begin, end = tl.load(begins + span), tl.load(begins + span + 1)
    source, target = tl.load(sources + span).to(tl.int64), tl.load(targets + span).to(tl.int64)
    place = head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + column[None, :]
    there = known[:, None] & inside[None, :]
    state = tl.load(states + source * (HEADS * KEY_DIM * VALUE_DIM) + place, mask=there & (source >= 0), other=0.0)
    before, same = nth[:, None] > nth[None, :], nth[:, None] == nth[None, :]
    q += head // SHARED * q_head
    k += head // SHARED * k_head
    v += head * v_head
    decay += head * decay_head
    beta += head * beta_head
    for first in range(begin, end, CHUNK):
        token = (first + nth).to(tl.int64)
        live = first + nth < end
        keyed_at = live[:, None] & known[None, :]
        query = tl.load(q + token[:, None] * q_token + key[None, :], mask=keyed_at, other=0.0).to(tl.float32)
        keyed = tl.load(k + token[:, None] * k_token + key[None, :], mask=keyed_at, other=0.0).to(tl.float32)
        if NORMALISE:
            query = query * tl.rsqrt(tl.sum(query * query, 1) + _EPS)[:, None]
            keyed = keyed * tl.rsqrt(tl.sum(keyed * keyed, 1) + _EPS)[:, None]
        query = query * scale
        value_at = live[:, None] & inside[None, :]
        value = tl.load(v + token[:, None] * v_token + column[None, :], mask=value_at, other=0.0).to(tl.float32)
        rate = tl.load(beta + token * beta_token, mask=live, other=0.0).to(tl.float32)
        since = tl.cumsum(tl.load(decay + token * decay_token, mask=live, other=0.0).to(tl.float32), 0)
        whole = tl.sum(tl.where(nth == CHUNK - 1, since, 0.0), 0)
        between = tl.exp(tl.where(before | same, since[:, None] - since[None, :], 0.0))
        # The change of a token, by those before it: rows of the inverse of 1 + system, from the top.
        system = tl.dot(keyed * rate[:, None], tl.trans(keyed), input_precision=PRECISION) * between
        system = tl.where(before, system, 0.0)
        inverse = tl.where(same, 1.0, 0.0)
        for row in tl.static_range(1, CHUNK):
            mine = tl.sum(tl.where(nth[:, None] == row, system, 0.0), 0)
            solved = tl.sum(mine[:, None] * inverse, 0)
            inverse = tl.where(nth[:, None] == row, inverse - solved[None, :], inverse)
        known_of = tl.dot(keyed * (rate * tl.exp(since))[:, None], state, input_precision=PRECISION)
        change = tl.dot(inverse, value * rate[:, None] - known_of, input_precision=PRECISION)
        reads = tl.dot(query, tl.trans(keyed), input_precision=PRECISION) * between
        read = tl.dot(query * tl.exp(since)[:, None], state, input_precision=PRECISION)
        read = tl.dot(tl.where(before | same, reads, 0.0), change, read, input_precision=PRECISION)
        at = (token * HEADS + head)[:, None] * VALUE_DIM + column[None, :]
        tl.store(out + at, read.to(out.dtype.element_ty), mask=value_at)
        learnt = keyed * tl.exp(whole - since)[:, None]
        state = tl.dot(tl.trans(learnt), change, state * tl.exp(whole), input_precision=PRECISION)
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
    out = torch.empty((tokens, heads, value_dim), dtype=v.dtype, device=v.device)
    by_key = decay.ndim == 3
    decay = decay.contiguous() if by_key else decay
    assert states.is_contiguous() and states.shape[1:] == (heads, key_dim, value_dim)
    keys, columns = max(16, triton.next_power_of_2(key_dim)), max(16, min(_COLUMNS, triton.next_power_of_2(value_dim)))
    grid = len(spans), heads, triton.cdiv(value_dim, columns)
    given = (
        q, k, v, decay, beta, states, out, spans.begin, spans.source, spans.target,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *decay.stride()[:2], *beta.stride(), key_dim**-0.5,
    )  # fmt: skip
    shape = {"HEADS": heads, "SHARED": heads // q.shape[1], "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    shape |= {"NORMALISE": normalise, "KEYS": keys, "COLUMNS": columns}
    if spans.single or by_key:
        _delta_rule[grid](*given, BY_KEY=by_key, **shape)
    else:
        precision = "ieee" if q.dtype == torch.float32 else "tf32"
        _delta_rule_in_chunks[grid](*given, CHUNK=_CHUNK, PRECISION=precision, **shape)
    return out
