"""From logits to the next step's inputs without the host, in Triton; the references are in ``sample_torch``.

``greedy`` and ``gumbel_sample`` go over blocks of the vocabulary first, then over the blocks' results. Noise comes from
a counter: a token's noise depends on (seed, prompt, sample, position, token) alone, not on the batch. ``advance`` takes
the tokens into the rows' state, so that a step can be launched before the host has seen the last step's tokens.
"""

from __future__ import annotations

import math

import torch

import triton
import triton.language as tl

from ..lists import sampling_recipes
from ..lists.sampling_recipes import RowRecipes
from ..reference import sample_torch
from ..reference.sample_torch import SAMPLE_BLOCK, Rows

GREEDY_BLOCK = 2048  # tokens of the vocabulary
ADVANCE_BLOCK = 64  # rows

_RUNNING = tl.constexpr(sample_torch.RUNNING)
_STOPPED = tl.constexpr(sample_torch.STOPPED)
_FULL = tl.constexpr(sample_torch.FULL)
_NO_PAGE = tl.constexpr(sample_torch.NO_PAGE)
_NO_TOKEN = tl.constexpr(sample_torch.NO_TOKEN)
_INFINITY = tl.constexpr(float("inf"))
_BEYOND = tl.constexpr(2**31 - 1)
_BEST = tl.constexpr(sampling_recipes.BEST)
# These may start anywhere in a table: without this, kernels would be compiled again for each alignment in memory.
_OF_ROWS = ["which", "seed", "prompt", "sample", "position"]


@triton.jit
def _best(scores, token):
    """The highest of some scores and its token, the lowest among equals. No score may be NaN."""
    best = tl.max(scores, 0)
    return best, tl.min(tl.where(scores == best, token, _BEYOND), 0)


@triton.jit
def _without_nan(scores):
    scores = scores.to(tl.float32)
    return tl.where(scores == scores, scores, _INFINITY)


@triton.jit
def _best_of_block(logits, row_stride, block_score, block_token, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    BLOCKS: tl.constexpr = triton.cdiv(VOCABULARY, BLOCK)
    row = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    token = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < VOCABULARY, other=-_INFINITY)
    best, which = _best(_without_nan(scores), token)
    tl.store(block_score + row * BLOCKS + block, best)
    tl.store(block_token + row * BLOCKS + block, which)


@triton.jit
def _log2_exponential(high, low):
    """The log2 of an exponential variable from 64 random bits: always finite."""
    # 63 bits make a number below one half, the last bit says at which end of (0, 1) it lies: in both, floats are dense.
    half = (high >> 1).to(tl.float32) * 2.3283064365386963e-10 + (low.to(tl.float32) + 0.5) * 5.421010862427522e-20
    # -log(1 - x) = 2 artanh(x / (2 - x)): the series keeps its digits where x is small, as 1 - x would not.
    s = half / (2.0 - half)
    t = s * s
    series = 1.0 / 11.0 + t * (1.0 / 13.0 + t * (1.0 / 15.0))
    series = 1.0 + t * (1.0 / 3.0 + t * (1.0 / 5.0 + t * (1.0 / 7.0 + t * (1.0 / 9.0 + t * series))))
    return tl.log2(tl.where((high & 1) == 1, 2.0 * s * series, -tl.log(half)))


@triton.jit
def _words(seed, token, position, sample, prompt, row):
    zero = token * 0
    return tl.philox(
        seed,
        token,
        zero + tl.load(position + row).to(tl.int32),
        zero + tl.load(sample + row).to(tl.int32),
        zero + tl.load(prompt + row).to(tl.int32),
    )


@triton.jit
def _kept(scores, threshold, ceiling, row, CUT: tl.constexpr, CAPPED: tl.constexpr):
    """Scores in float32, without those below the row's threshold or above its ceiling. NaN is neither."""
    scores = scores.to(tl.float32)
    if CUT:
        scores = tl.where(scores < tl.load(threshold + row), -_INFINITY, scores)
    if CAPPED:
        scores = tl.where(scores > tl.load(ceiling + row), -_INFINITY, scores)
    return scores


@triton.jit
def _noisy_weight(
    scores, factor, threshold, ceiling, seed, token, prompt, sample, position, row,
    CUT: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """The noisy weight of several tokens together; infinity if a score is NaN or infinite."""
    scores = _kept(scores, threshold, ceiling, row, CUT, CAPPED)
    peak = tl.max(scores, 0)
    peak = tl.where(peak == -_INFINITY, 0.0, peak)  # avoids inf - inf
    # In units of log2, as all weights here; NaN if a score is NaN or infinite. The difference is taken before the
    # product: a fused multiply-add would otherwise leave the product's rounding, which is much where scores are large.
    weight = peak * factor + tl.log2(tl.sum(tl.exp2((scores - peak) * factor), 0))
    _, _, high, low = _words(seed, token, position, sample, prompt, row)
    score = weight - _log2_exponential(high, low)
    return tl.where(score == score, score, _INFINITY)


@triton.jit
def _drawn(
    scores, factor, threshold, ceiling, seed, token, prompt, sample, position, row, best,
    CUT: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """One of some tokens; -1 if the ``best`` noisy weight is not finite."""
    high, low, _, _ = _words(seed, token, position, sample, prompt, row)
    _, which = _best(_kept(scores, threshold, ceiling, row, CUT, CAPPED) * factor - _log2_exponential(high, low), token)
    return tl.where((best > -_INFINITY) & (best < _INFINITY), which, -1)


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def _noisy_weight_of_block(
    logits, row_stride, which, factor, threshold, ceiling, seed, prompt, sample, position, block_score,
    BY_ROW: tl.constexpr,
    SOME_BEST: tl.constexpr,
    CUT: tl.constexpr,
    CAPPED: tl.constexpr,
    SEEDS: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = triton.cdiv(VOCABULARY, BLOCK)
    row = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    token = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < VOCABULARY, other=-_INFINITY)
    if BY_ROW:
        factor = tl.load(factor + tl.load(which + row))
    if SOME_BEST and factor == _BEST:
        score = tl.max(_without_nan(scores), 0)
    else:
        key = tl.load(seed + row if SEEDS else seed)
        score = _noisy_weight(
            scores, factor, threshold, ceiling, key, block * BLOCK, prompt, sample, position, row, CUT, CAPPED
        )
    tl.store(block_score + row * BLOCKS + block, score)


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def _draw_from_best_block(
    logits, row_stride, which, factor, threshold, ceiling, seed, prompt, sample, position, block_score, out,
    BY_ROW: tl.constexpr,
    SOME_BEST: tl.constexpr,
    CUT: tl.constexpr,
    CAPPED: tl.constexpr,
    SEEDS: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = triton.cdiv(VOCABULARY, BLOCK)
    row = tl.program_id(0)
    if BY_ROW:
        factor = tl.load(factor + tl.load(which + row))
    at = tl.arange(0, triton.next_power_of_2(BLOCKS))
    best, block = _best(tl.load(block_score + row * BLOCKS + at, mask=at < BLOCKS, other=-_INFINITY), at)
    token = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < VOCABULARY, other=-_INFINITY)
    if SOME_BEST and factor == _BEST:
        _, picked = _best(_without_nan(scores), token)
    else:
        key = tl.load(seed + row if SEEDS else seed)
        picked = _drawn(
            scores, factor, threshold, ceiling, key, token, prompt, sample, position, row, best, CUT, CAPPED
        )
    tl.store(out + row, picked.to(tl.int64))


@triton.jit
def _best_of_blocks(block_score, block_token, out, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, triton.next_power_of_2(BLOCKS))
    scores = tl.load(block_score + row * BLOCKS + at, mask=at < BLOCKS, other=-_INFINITY)
    tokens = tl.load(block_token + row * BLOCKS + at, mask=at < BLOCKS, other=_BEYOND)
    _, token = _best(scores, tokens)
    tl.store(out + row, token.to(tl.int64))


def greedy(
    logits: torch.Tensor,  # [rows, vocabulary]
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [rows] int64
    """The best token of each row, the lowest among equals; NaN counts as infinity."""
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    blocks = triton.cdiv(vocabulary, GREEDY_BLOCK)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    scores = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    if rows:
        _best_of_block[(rows * blocks,)](
            logits, logits.stride(0), scores, tokens, VOCABULARY=vocabulary, BLOCK=GREEDY_BLOCK, num_warps=4
        )
        _best_of_blocks[(rows,)](scores, tokens, out, BLOCKS=blocks, num_warps=1)
    return out


def gumbel_sample(
    logits: torch.Tensor,  # [rows, vocabulary]
    temperature: float | RowRecipes,  # or each row's recipe
    seed: torch.Tensor,  # [1] or [rows] int64  one for all rows, or one for each
    prompt: torch.Tensor,  # [rows] int64 or int32, as are the next two
    sample: torch.Tensor,
    position: torch.Tensor,
    *,
    threshold: torch.Tensor | None = None,  # [rows] float32  tokens with a logit below it never come
    ceiling: torch.Tensor | None = None,  # [rows] float32  nor do those with a logit above this
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [rows] int64
    """One token a row from softmax(logits / temperature); -1 where a logit is NaN or infinite, or all are -inf.

    The noise of a token depends on (seed, prompt, sample, position, token) alone. First a block of the vocabulary is
    drawn, by the sum of its tokens' weights, then one of its tokens: noise is made for few tokens, not for all.
    Rows whose recipe is greedy get the token of ``greedy``.
    Scores are float32: of two whose noisy scores are nearer than about 1e-6 of their size, either may be drawn.
    """
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    blocks = triton.cdiv(vocabulary, SAMPLE_BLOCK)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    scores = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    by_row = isinstance(temperature, RowRecipes)
    if isinstance(temperature, RowRecipes):
        table, which = temperature.table, temperature.which
        factor, some_best = table.numbers.factor, table.takes_best
    else:
        which, factor, some_best = scores, math.log2(math.e) / temperature, False
    given = (
        logits, logits.stride(0), which, factor, scores if threshold is None else threshold,
        scores if ceiling is None else ceiling, seed, prompt, sample, position, scores,
    )  # fmt: skip
    shape = {
        "BY_ROW": by_row, "SOME_BEST": some_best, "CUT": threshold is not None, "CAPPED": ceiling is not None,
        "SEEDS": len(seed) > 1, "VOCABULARY": vocabulary, "BLOCK": SAMPLE_BLOCK,
    }  # fmt: skip
    if rows:
        _noisy_weight_of_block[(rows * blocks,)](*given, **shape, num_warps=4)
        _draw_from_best_block[(rows,)](*given, out, **shape, num_warps=8)  # more threads: each has much to do
    return out


@triton.jit(do_not_specialize_on_alignment=["which"])
def _advance(
    token, position, length, slot, made, remaining, status, start, pages, produced,
    sampled, eos, n_eos, which, n_rows,
    BY_ROW: tl.constexpr,
    STEPS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n_rows
    running = inside & (tl.load(status + row, mask=inside, other=_STOPPED) == _RUNNING)
    new = tl.load(sampled + row, mask=running, other=-1)
    real = running & (new >= 0)
    count = tl.load(made + row, mask=real, other=0)
    tl.store(produced + row.to(tl.int64) * STEPS + count % STEPS, new, mask=real)
    tl.store(made + row, count + 1, mask=real)
    left = tl.load(remaining + row, mask=real, other=0) - 1
    tl.store(remaining + row, left, mask=real)

    stopped = new != new
    if BY_ROW:
        ends = eos + tl.load(which + row, mask=inside, other=0).to(tl.int64) * n_eos
        for i in tl.range(n_eos):
            stopped = stopped | (new == tl.load(ends + i, mask=real, other=-1))
    else:
        for i in tl.range(n_eos):
            stopped = stopped | (new == tl.load(eos + i))
    stopped = stopped & real
    full = real & (left <= 0)
    moving = real & (left > 0) & (stopped == 0)

    at = tl.load(position + row, mask=moving, other=0) + 1
    before = tl.load(length + row, mask=moving, other=0)
    offset = before - tl.load(start + row, mask=moving, other=0)
    index = offset // PAGE
    page = tl.load(pages + row.to(tl.int64) * PAGES + index, mask=moving & (index < PAGES), other=-1).to(tl.int64)
    tl.store(token + row, new, mask=moving)
    tl.store(position + row, at, mask=moving)
    tl.store(length + row, tl.where(moving, before + 1, 0), mask=running)
    tl.store(slot + row, tl.where(moving & (page >= 0), page * PAGE + offset % PAGE, -1), mask=running)
    code = tl.where(stopped, _STOPPED, tl.where(full, _FULL, tl.where(real, _NO_PAGE, _NO_TOKEN)))
    tl.store(status + row, code, mask=running & ((moving == 0) | (page < 0)))


def advance(
    rows: Rows, sampled: torch.Tensor, eos: torch.Tensor, page_size: int, which: torch.Tensor | None = None
) -> None:
    """Append each row's ``sampled`` token ([rows] int64), see whether that ends it, and move on to it.

    ``eos`` ([any] int64) may be padded with -1. With ``which`` ([rows] int32) it is several such sets ([sets, any]).
    A row that ends keeps its last input, has no slot, and sees no positions any more. A row that lacks the page for its
    token moves on without a slot: it can run again once it is given a page and a slot.
    """
    assert rows.pages.is_contiguous() and rows.produced.is_contiguous()
    count = len(rows.token)
    if count == 0:
        return
    _advance[(triton.cdiv(count, ADVANCE_BLOCK),)](
        rows.token, rows.position, rows.length, rows.slot, rows.made, rows.remaining, rows.status, rows.start,
        rows.pages, rows.produced, sampled, eos, eos.shape[-1], eos if which is None else which, count,
        BY_ROW=which is not None, STEPS=rows.produced.shape[1], PAGES=rows.pages.shape[1], PAGE=page_size,
        BLOCK=ADVANCE_BLOCK, num_warps=2,
    )  # fmt: skip
