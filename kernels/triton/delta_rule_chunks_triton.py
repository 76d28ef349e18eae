"""The gated delta rule over prompts, chunk by chunk, for decays by head.

Within a chunk each token's change depends on the changes before it, through the products of keys: a triangular system,
the same for all columns of the state. Its inverse makes of the values the changes that an empty state would see, and
of the keys what the chunk asks of a state: change = empty - asks @ state. Neither needs the state. So a first kernel
makes both for all chunks side by side, and the products of queries with keys too. A second one walks through the chunks
of a span, with some columns of the state in registers: only two products of matrices wait for each other in a chunk.

The walk has columns for rows. So what comes of the state is always the left side of a product, which stays in
registers, and the right side comes from memory as it is. Norms and decays are a number for each token: they go to the
sides of small matrices, never to queries and keys.

Inputs of 16 bits are multiplied as they are, and what is made on the way has 16 bits where it is a side of a product:
its error is that of the values themselves. Sums, the state and the inverse are float32. So is all for float32 inputs.
"""

from __future__ import annotations

from typing import Any

import torch

import triton
import triton.language as tl

from ..lists.spans import CHUNK, Spans
from ..reference.delta_rule_torch import EPS

_EPS = tl.constexpr(EPS)
_BLOCK = tl.constexpr(16)  # rows and columns: the least that a product of matrices takes
_SIZE = 32  # tokens that are solved together: CHUNK or a part of it. With 32, two blocks that walk fit on a processor
_COLUMNS = 64  # of a block that walks: 64 for each 4 warps
_WARPS = 4
_STAGES = 2  # chunks of a walk that are in shared memory, or on their way there


@triton.jit
def _diagonal(matrix, SIZE: tl.constexpr, COUNT: tl.constexpr):  # [COUNT * SIZE, same] -> [COUNT, SIZE, SIZE]
    """The blocks on the diagonal."""
    nth = tl.arange(0, COUNT)
    same = nth[:, None, None, None] == nth[None, None, :, None]
    return tl.sum(tl.where(same, tl.reshape(matrix, (COUNT, SIZE, COUNT, SIZE)), 0.0), 2)


@triton.jit
def _merged(inverse, system, SIZE: tl.constexpr, COUNT: tl.constexpr):  # [2 * COUNT, SIZE, SIZE] -> half as many
    """Inverses of blocks of 1 + system, twice as large: [[upper, 0], [-lower @ system @ upper, lower]]."""
    pairs = tl.permute(tl.reshape(inverse, (COUNT, 2, SIZE, SIZE)), (0, 2, 3, 1))
    upper, lower = tl.split(pairs)
    blocks = tl.reshape(_diagonal(system, 2 * SIZE, COUNT), (COUNT, 2, SIZE, 2, SIZE))
    left, _ = tl.split(tl.permute(blocks, (0, 2, 4, 1, 3)))
    _, between = tl.split(left)
    below = -tl.dot(tl.dot(lower, between, input_precision="ieee"), upper, input_precision="ieee")
    left, right = tl.join(upper, below), tl.join(tl.zeros_like(lower), lower)
    return tl.reshape(tl.permute(tl.join(left, right), (0, 3, 1, 4, 2)), (COUNT, 2 * SIZE, 2 * SIZE))


@triton.jit
def _inverse(system, SIZE: tl.constexpr):  # [SIZE, SIZE], only zeros on the diagonal and above
    """The inverse of 1 + system, from blocks of 1 to ever larger ones: see ``_merged``. No power is taken of anything.

    The products are small: in full float32 they cost little. Keys that are alike would make rounding errors large.
    """
    COUNT: tl.constexpr = SIZE // _BLOCK
    nth = tl.arange(0, _BLOCK)
    row, column = nth[None, :, None], nth[None, None, :]
    small = _diagonal(system, _BLOCK, COUNT)
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, small, 0.0)
    for level in tl.static_range(1, 4):  # blocks of 2, 4 and 8 become blocks of 4, 8 and 16
        within = row // (2 << level) == column // (2 << level)
        between = tl.where(within & (row // (1 << level) != column // (1 << level)), small, 0.0)
        inverse -= tl.dot(tl.dot(inverse, between, input_precision="ieee"), inverse, input_precision="ieee")
    if SIZE >= 2 * _BLOCK:
        inverse = _merged(inverse, system, _BLOCK, SIZE // (2 * _BLOCK))
    if SIZE >= 4 * _BLOCK:
        inverse = _merged(inverse, system, 2 * _BLOCK, SIZE // (4 * _BLOCK))
    return tl.reshape(inverse, (SIZE, SIZE))


@triton.jit(do_not_specialize=["tokens"])  # any number, in any step
def _solve_chunks(
    q, k, v, decay, beta, out, asks, scores, factors, chunks, tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, decay_token, decay_head, beta_token, beta_head, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, NORMALISE: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block takes a chunk, or one of its parts, for one head. It leaves in ``out`` the changes of an empty state."""
    head, chunk = tl.program_id(0), tl.program_id(1) // PARTS
    first = tl.load(chunks + chunk) + tl.program_id(1) % PARTS * SIZE
    count = tl.load(chunks + chunk + 1) - first
    if count <= 0:
        return
    key, nth = tl.arange(0, KEYS), tl.arange(0, SIZE)
    live, begin, place = nth < count, first.to(tl.int64), head.to(tl.int64) * tokens + first
    key_there = live[:, None] & (key < KEY_DIM)[None, :]
    q += begin * q_token + head // SHARED * q_head
    k += begin * k_token + head // SHARED * k_head
    v += begin * v_token + head * v_head
    keyed = tl.load(k + nth[:, None] * k_token + key[None, :], mask=key_there, other=0.0).to(asks.dtype.element_ty)
    query = tl.load(q + nth[:, None] * q_token + key[None, :], mask=key_there, other=0.0).to(asks.dtype.element_ty)
    rate = tl.load(beta + begin * beta_token + head * beta_head + nth * beta_token, mask=live, other=0.0)
    since = tl.load(decay + begin * decay_token + head * decay_head + nth * decay_token, mask=live, other=0.0)
    rate, since = rate.to(tl.float32), since.to(tl.float32)
    whole = tl.sum(since, 0)
    since = tl.cumsum(since, 0)
    query_norm, key_norm = tl.full((SIZE,), scale, tl.float32), tl.full((SIZE,), 1.0, tl.float32)
    if NORMALISE:
        wide_query, wide_key = query.to(tl.float32), keyed.to(tl.float32)
        query_norm *= tl.rsqrt(tl.sum(wide_query * wide_query, 1) + _EPS)
        key_norm = tl.rsqrt(tl.sum(wide_key * wide_key, 1) + _EPS)
    factors += place + 2 * head.to(tl.int64) * tokens
    tl.store(factors + nth, query_norm * tl.exp(since), mask=live)
    tl.store(factors + tokens + nth, key_norm * tl.exp(whole - since), mask=live)
    tl.store(factors + 2 * tokens + nth, tl.exp(since), mask=live)

    before, same = nth[:, None] > nth[None, :], nth[:, None] == nth[None, :]
    between = tl.exp(tl.where(before | same, since[:, None] - since[None, :], 0.0)) * key_norm[None, :]
    reads = tl.dot(query, tl.trans(keyed), input_precision=PRECISION) * between * query_norm[:, None]
    at = nth[:, None] * SIZE + nth[None, :]
    reads = tl.where(before | same, reads, 0.0)
    tl.store(scores + place * SIZE + at, reads.to(scores.dtype.element_ty), mask=live[:, None])
    system = tl.dot(keyed, tl.trans(keyed), input_precision=PRECISION) * between * (rate * key_norm)[:, None]
    inverse = _inverse(tl.where(before, system, 0.0), SIZE)

    asked = inverse * (rate * key_norm * tl.exp(since))[None, :]
    asked = tl.dot(asked.to(keyed.dtype), keyed, input_precision=PRECISION)
    at = nth[:, None] * KEY_DIM + key[None, :]
    tl.store(asks + place * KEY_DIM + at, asked.to(asks.dtype.element_ty), mask=key_there)
    taught = (inverse * rate[None, :]).to(keyed.dtype)
    out += (begin * HEADS + head) * VALUE_DIM
    for block in tl.static_range(0, VALUE_DIM, COLUMNS):
        column = block + tl.arange(0, COLUMNS)
        there = live[:, None] & (column < VALUE_DIM)[None, :]
        value = tl.load(v + nth[:, None] * v_token + column[None, :], mask=there, other=0.0).to(keyed.dtype)
        change = tl.dot(taught, value, input_precision=PRECISION)
        at = nth[:, None] * (HEADS * VALUE_DIM) + column[None, :]
        tl.store(out + at, change.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens"])  # any number, in any step
def _walk_chunks(
    q, k, out, asks, scores, factors, states, begins, sources, targets, tokens, q_token, q_head, k_token, k_head,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block walks through a span with some columns of one head. What it reads in ``out`` it alone overwrites."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head, span = tl.program_id(1), tl.program_id(2)
    key, nth = tl.arange(0, KEYS), tl.arange(0, SIZE)
    known, inside = key < KEY_DIM, column < VALUE_DIM
    begin, end = tl.load(begins + span), tl.load(begins + span + 1)
    source, target = tl.load(sources + span).to(tl.int64), tl.load(targets + span).to(tl.int64)
    place = head * (KEY_DIM * VALUE_DIM) + key[None, :] * VALUE_DIM + column[:, None]
    there = known[None, :] & inside[:, None]
    state = tl.load(states + source * (HEADS * KEY_DIM * VALUE_DIM) + place, mask=there & (source >= 0), other=0.0)
    q += head // SHARED * q_head
    k += head // SHARED * k_head
    for chunk in tl.range(tl.cdiv(end - begin, SIZE), num_stages=STAGES):  # loads for no product, too, come early
        first = begin + chunk * SIZE
        live, token, place_of = nth < end - first, first.to(tl.int64), head.to(tl.int64) * tokens + first
        key_there, value_there = live[:, None] & known[None, :], live[None, :] & inside[:, None]
        at = nth[:, None] * KEY_DIM + key[None, :]
        asked = tl.load(asks + place_of * KEY_DIM + at, mask=key_there, other=0.0)
        values = out + (token * HEADS + head) * VALUE_DIM + nth[None, :] * (HEADS * VALUE_DIM) + column[:, None]
        change = tl.load(values, mask=value_there, other=0.0).to(tl.float32)
        query = tl.load(q + token * q_token + nth[:, None] * q_token + key[None, :], mask=key_there, other=0.0)
        keyed = tl.load(k + token * k_token + nth[:, None] * k_token + key[None, :], mask=key_there, other=0.0)
        at = nth[:, None] * SIZE + nth[None, :]
        score = tl.load(scores + place_of * SIZE + at, mask=live[:, None], other=0.0)
        factor = factors + 3 * head.to(tl.int64) * tokens + first
        reading = tl.load(factor + nth, mask=live, other=0.0)
        teaching = tl.load(factor + tokens + nth, mask=live, other=0.0)
        left = tl.load(factor + 2 * tokens + tl.minimum(end - first, SIZE) - 1)

        held = state.to(asked.dtype)
        change -= tl.dot(held, tl.trans(asked), input_precision=PRECISION)
        read = tl.dot(held, tl.trans(query.to(asked.dtype)), input_precision=PRECISION) * reading[None, :]
        taught = (change * teaching[None, :]).to(asked.dtype)
        state = tl.dot(taught, keyed.to(asked.dtype), state * left, input_precision=PRECISION)
        read = tl.dot(change.to(asked.dtype), tl.trans(score), read, input_precision=PRECISION)
        tl.store(values, read.to(out.dtype.element_ty), mask=value_there)
    tl.store(states + target * (HEADS * KEY_DIM * VALUE_DIM) + place, state, mask=there & (target >= 0))


def delta_rule_in_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    spans: Spans,
    normalise: bool,
) -> torch.Tensor:
    """The same as ``delta_rule``. In the last dimension q, k and v are contiguous, and decays are by head."""
    tokens, heads, value_dim = v.shape
    key_dim = q.shape[2]
    keys, values = (max(16, triton.next_power_of_2(size)) for size in (key_dim, value_dim))
    dtype = v.dtype if v.dtype == q.dtype == k.dtype else torch.float32
    if dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        dtype = torch.float32  # the interpreter's products take bfloat16 for integers
    exact = dtype == torch.float32
    size = 16 if exact or keys > 128 else _SIZE  # products in full float32 keep their sides in registers
    out = torch.empty((tokens, heads, value_dim), dtype=v.dtype, device=v.device)
    asks = torch.empty((heads, tokens, key_dim), dtype=dtype, device=v.device)
    scores = torch.empty((heads, tokens, size), dtype=dtype, device=v.device)
    factors = torch.empty((heads, 3, tokens), dtype=torch.float32, device=v.device)
    shape: dict[str, Any] = {"HEADS": heads, "SHARED": heads // q.shape[1], "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    shape |= {"KEYS": keys, "SIZE": size, "PRECISION": "ieee" if exact else None}  # None: nothing to choose for 16 bits
    parts = CHUNK // size
    _solve_chunks[heads, (len(spans.chunk) - 1) * parts](
        q, k, v, decay, beta, out, asks, scores, factors, spans.chunk, tokens,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *decay.stride(), *beta.stride(), key_dim**-0.5,
        **shape, NORMALISE=normalise, COLUMNS=min(values, 128), PARTS=parts, num_warps=8 if size > 32 else 4,
    )  # fmt: skip
    columns, stages, warps = _COLUMNS, _STAGES, _WARPS
    if exact or keys > 128:
        columns, stages, warps = 16, 2, 4
    columns = min(values, columns)
    _walk_chunks[triton.cdiv(value_dim, columns), heads, len(spans)](
        q, k, out, asks, scores, factors, states, spans.begin, spans.source, spans.target, tokens,
        *q.stride()[:2], *k.stride()[:2], **shape, COLUMNS=columns, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out
