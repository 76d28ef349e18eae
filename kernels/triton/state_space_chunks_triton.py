"""Mamba-2's state space over prompts, chunk by chunk.

Within a chunk a token sees the tokens before it through products of c and b, weighted with the decay between the two.
Neither this nor what a chunk teaches needs the state. So one kernel walks through the chunks of a span, with some rows
of one head's state in registers: from chunk to chunk the state waits for one product of matrices. The products of c and
b are the same for all heads of a group. Each block makes them anew: that takes no longer than to write and read them.
Decays are sums along a chunk, for which threads wait for each other. A first kernel makes them for all chunks side by
side. They are logarithms to the base of 2: differences come before powers, so nothing overflows.

Outputs have rows of the state for rows. So what comes of the state is always the left side of a product, which stays in
registers, and b and c come from memory as they are. Decays go to the small matrix of a chunk and to x.

Inputs of 16 bits are multiplied as they are, and what is made on the way has 16 bits where it is a side of a product:
its error is that of the values themselves. Sums and the state are float32. So are the products of bfloat16 under the
interpreter. Inputs in float32 do not come here: without tensor cores the walk token by token is faster.
"""

from __future__ import annotations

import math

import torch

import triton
import triton.language as tl

from ..cards import card_on
from ..lists.spans import CHUNK, Spans
from .time_step_triton import limited_time_step

_LOG2E = tl.constexpr(math.log2(math.e))
_LEAST = tl.constexpr(-127.0)  # of a logarithm: nothing is left. A lower one would cost a sum the digits of the others
_NEVER = tl.constexpr(-1e30)
_SIZE = 64  # tokens of a chunk
_LONG = 256  # spans that are shorter on average have chunks of half the size
_ROWS = 64  # of a block: 64 for each 4 warps
_WARPS = 4
_HEADS = 16  # of a block that makes decays
_STAGES = 2  # chunks that are in shared memory, or on their way there


@triton.jit(do_not_specialize=["tokens"])  # any number, in any step
def _decays_in_chunks(
    dt, a, dt_bias, factors, chunks, tokens, dt_token, dt_head, least, most,
    HEADS: tl.constexpr, SOFTPLUS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block takes a chunk, or one of its parts, for some heads."""
    chunk, nth = tl.program_id(0) // PARTS, tl.arange(0, SIZE)
    first = tl.load(chunks + chunk) + tl.program_id(0) % PARTS * SIZE
    count = tl.load(chunks + chunk + 1) - first
    if count <= 0:
        return
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (head < HEADS)[:, None] & (nth < count)[None, :]
    begin = first.to(tl.int64)
    bias = None if dt_bias is None else tl.load(dt_bias + head, mask=head < HEADS, other=0.0)[:, None]
    step = tl.load(dt + begin * dt_token + nth[None, :] * dt_token + head[:, None] * dt_head, mask=there, other=0.0)
    step = tl.where(there, limited_time_step(step, bias, least, most, SOFTPLUS), 0.0)
    rate = tl.load(a + head, mask=head < HEADS, other=0.0).to(tl.float32) * _LOG2E
    since = tl.maximum(rate[:, None] * step, _LEAST)
    whole = tl.sum(since, 1)
    since = tl.cumsum(since, 1)
    factors += 4 * head[:, None].to(tl.int64) * tokens + begin + nth[None, :]
    tl.store(factors, since, mask=there)
    tl.store(factors + tokens, step, mask=there)
    tl.store(factors + 2 * tokens, tl.exp2(since), mask=there)
    tl.store(factors + 3 * tokens, step * tl.exp2(whole[:, None] - since), mask=there)


@triton.jit(do_not_specialize=["tokens"])  # any number, in any step
def _space_in_chunks(
    x, b, c, d, factors, states, out, begins, sources, targets, tokens, x_head, b_group, c_group,
    X_TOKEN: tl.constexpr, B_TOKEN: tl.constexpr, C_TOKEN: tl.constexpr,
    HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    STATES: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block walks through a span with some rows of one head.

    The matrices need the registers that addresses would fill. So steps from token to token are constants, and the loop
    keeps nothing that it can make anew.
    """
    TYPE: tl.constexpr = tl.float32 if EXACT else x.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if EXACT else None  # None: nothing to choose for 16 bits
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, span = tl.program_id(1), tl.program_id(2)
    key, nth = tl.arange(0, STATES), tl.arange(0, SIZE)
    inside, known = row < HEAD_DIM, key < STATE_DIM
    begin, end = tl.load(begins + span), tl.load(begins + span + 1)
    source = tl.load(sources + span).to(tl.int64)
    place = head * (HEAD_DIM * STATE_DIM) + row[:, None] * STATE_DIM + key[None, :]
    there = inside[:, None] & known[None, :]
    state = tl.load(states + source * (HEADS * HEAD_DIM * STATE_DIM) + place, mask=there & (source >= 0), other=0.0)
    x += head * x_head
    b += head // SHARED * b_group
    c += head // SHARED * c_group
    factors += 4 * head.to(tl.int64) * tokens
    for first in tl.range(begin, end, SIZE, num_stages=STAGES, disable_licm=True):
        live, token = nth < end - first, tl.cast(first, tl.int64)  # which takes the interpreter's int, too
        key_there, row_there = live[:, None] & known[None, :], inside[:, None] & live[None, :]
        given = tl.load(x + token * X_TOKEN + nth[None, :] * X_TOKEN + row[:, None], mask=row_there, other=0.0)
        learns = tl.load(b + token * B_TOKEN + nth[:, None] * B_TOKEN + key[None, :], mask=key_there, other=0.0)
        reads = tl.load(c + token * C_TOKEN + nth[:, None] * C_TOKEN + key[None, :], mask=key_there, other=0.0)
        since = tl.load(factors + first + nth, mask=live, other=_NEVER)  # behind the end nothing is seen
        step = tl.load(factors + tokens + first + nth, mask=live, other=0.0)
        reading = tl.load(factors + 2 * tokens + first + nth, mask=live, other=0.0)
        teaching = tl.load(factors + 3 * tokens + first + nth, mask=live, other=0.0)
        left = tl.load(factors + 2 * tokens + tl.minimum(first + SIZE, end) - 1)
        given, learns, reads = given.to(TYPE), learns.to(TYPE), reads.to(TYPE)

        between = since[None, :] - since[:, None]  # later tokens, in columns, see earlier ones
        between = tl.exp2(tl.where(nth[:, None] <= nth[None, :], between, float("-inf"))) * step[:, None]
        score = tl.dot(learns, tl.trans(reads), input_precision=PRECISION) * between
        read = tl.dot(state.to(TYPE), tl.trans(reads), input_precision=PRECISION) * reading[None, :]
        if d is not None:
            read += tl.load(d + head).to(tl.float32) * given.to(tl.float32)
        read = tl.dot(given, score.to(TYPE), read, input_precision=PRECISION)
        taught = (given.to(tl.float32) * teaching[None, :]).to(TYPE)
        state = tl.dot(taught, learns, state * left, input_precision=PRECISION)
        values = out + (token * HEADS + head) * HEAD_DIM + nth[None, :] * (HEADS * HEAD_DIM) + row[:, None]
        tl.store(values, read, mask=row_there)
    target = tl.load(targets + span).to(tl.int64)
    tl.store(states + target * (HEADS * HEAD_DIM * STATE_DIM) + place, state, mask=there & (target >= 0))


def state_space_in_chunks(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    states: torch.Tensor,
    spans: Spans,
    softplus: bool,
    limit: tuple[float, float],
) -> torch.Tensor:
    """The same as ``state_space``. In the last dimension x, b and c are contiguous, and so is all that is by head."""
    tokens, heads, head_dim = x.shape
    state_dim = b.shape[2]
    rows, keys = (max(16, triton.next_power_of_2(size)) for size in (head_dim, state_dim))
    exact = x.dtype == torch.float32 or not x.dtype == b.dtype == c.dtype
    if x.dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        exact = True  # the interpreter's products take bfloat16 for integers
    size, most_rows, warps = min(_SIZE, card_on(x.device).scan_tokens), _ROWS, _WARPS
    if exact:  # products in full float32 keep their sides in registers
        size, most_rows, warps = 16, 16, 8
    elif keys > 128:
        size, most_rows, warps = 32, 32, 4
    elif tokens < _LONG * len(spans):
        size = min(size, 32)
    rows = min(rows, most_rows)
    out = torch.empty((tokens, heads, head_dim), dtype=torch.float32, device=x.device)
    factors = torch.empty((heads, 4, tokens), dtype=torch.float32, device=x.device)
    parts = CHUNK // size
    _decays_in_chunks[(len(spans.chunk) - 1) * parts, triton.cdiv(heads, _HEADS)](
        dt, a, dt_bias, factors, spans.chunk, tokens, *dt.stride(), *map(float, limit),
        HEADS=heads, SOFTPLUS=softplus, SIZE=size, PARTS=parts, BLOCK=_HEADS,
    )  # fmt: skip
    _space_in_chunks[triton.cdiv(head_dim, rows), heads, len(spans)](
        x, b, c, d, factors, states, out, spans.begin, spans.source, spans.target, tokens,
        x.stride(1), b.stride(1), c.stride(1), X_TOKEN=x.stride(0), B_TOKEN=b.stride(0), C_TOKEN=c.stride(0),
        HEADS=heads, SHARED=heads // b.shape[1], HEAD_DIM=head_dim, STATE_DIM=state_dim,
        STATES=keys, ROWS=rows, SIZE=size, EXACT=exact, STAGES=_STAGES, num_warps=warps,
    )  # fmt: skip
    return out
