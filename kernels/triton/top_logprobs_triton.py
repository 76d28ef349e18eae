"""Log-probabilities of picked tokens and of the most likely beside them, in Triton; reference: ``top_logprobs_torch``.

Blocks of the vocabulary are surveyed first: the mass of each, and the best of its tokens. Then one block for each row
puts them together and writes what was asked for to the row's place.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl

TOP_LOGPROBS_BLOCK = 4096  # tokens of the vocabulary

_INFINITY = tl.constexpr(float("inf"))
_BEYOND = tl.constexpr(2**31 - 1)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _ranked(scores):
    return tl.where(scores == scores, scores, _INFINITY)


@triton.jit
def _survey_top_logprobs(
    logits, row_stride, block_best, block_mass, found_score, found_token,
    K: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = triton.cdiv(VOCABULARY, BLOCK)
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCABULARY
    scores = tl.load(logits + row * row_stride + token, mask=inside, other=-_INFINITY).to(tl.float32)
    ranked = _ranked(scores)
    best = tl.max(ranked, 0)
    peak = tl.where(best == -_INFINITY, 0.0, best)  # avoids inf - inf
    tl.store(block_best + row * BLOCKS + block, best)
    tl.store(block_mass + row * BLOCKS + block, tl.sum(tl.exp2((scores - peak) * _LOG2E), 0))
    found = (row * BLOCKS + block) * K
    for place in tl.static_range(K):
        best = tl.max(tl.where(inside, ranked, -_INFINITY), 0)
        which = tl.min(tl.where(inside & (ranked == best), token, _BEYOND), 0)
        tl.store(found_score + found + place, best)
        tl.store(found_token + found + place, which)
        inside = inside & (token != which)


# The number of rows decides on the alignment of some of these: do not compile for it.
@triton.jit(do_not_specialize_on_alignment=["picked", "made", "block_mass"])
def _note_top_logprobs(
    logits, row_stride, picked, made, block_best, block_mass, found_score, found_token, ids, values,
    BY_PLACE: tl.constexpr,
    PLACES: tl.constexpr,
    K: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = triton.cdiv(VOCABULARY, BLOCK)
    FOUND: tl.constexpr = BLOCKS * K
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, triton.next_power_of_2(BLOCKS))
    bests = tl.load(block_best + row * BLOCKS + block, mask=block < BLOCKS, other=-_INFINITY)
    masses = tl.load(block_mass + row * BLOCKS + block, mask=block < BLOCKS, other=0.0)
    best = tl.max(bests, 0)
    peak = tl.where(best == -_INFINITY, 0.0, best)
    of_all = peak + tl.log(tl.sum(masses * tl.exp2((tl.where(masses > 0, bests, peak) - peak) * _LOG2E), 0))
    place = row * PLACES
    if BY_PLACE:
        place += tl.load(made + row).to(tl.int64) % PLACES
    token = tl.load(picked + row)
    there = (token >= 0) & (token < VOCABULARY)
    score = tl.load(logits + row * row_stride + token, mask=there, other=float("nan")).to(tl.float32)
    tl.store(values + place * (K + 1) + K, score - of_all)
    if K > 0:
        at = tl.arange(0, triton.next_power_of_2(FOUND))
        scores = tl.load(found_score + row * FOUND + at, mask=at < FOUND, other=-_INFINITY)
        tokens = tl.load(found_token + row * FOUND + at, mask=at < FOUND, other=_BEYOND)
        left = tokens < _BEYOND
        for number in tl.static_range(K):
            best = tl.max(tl.where(left, scores, -_INFINITY), 0)
            which = tl.min(tl.where(left & (scores == best), tokens, _BEYOND), 0)
            tl.store(ids + place * K + number, which)
            tl.store(values + place * (K + 1) + number, best - of_all)
            left = left & (tokens != which)


def note_top_logprobs(
    logits: torch.Tensor,  # [rows, vocabulary]
    picked: torch.Tensor,  # [rows] int64  -1: none, whose log-probability is NaN
    ids: torch.Tensor,  # [rows, places, k] int32  gets the k most likely tokens, the lowest first among equals
    values: torch.Tensor,  # [rows, places, k + 1] float32  gets their log-probabilities, then that of the picked token
    made: torch.Tensor | None = None,  # [rows]  each row's place is this, modulo ``places``; None: the only place
) -> None:
    """Write the log-probabilities (of the logits as they are) of each row's token and its ``k`` most likely ones."""
    rows, vocabulary = logits.shape
    places, k = ids.shape[1:]
    assert logits.stride(1) == 1 and ids.is_contiguous() and values.is_contiguous() and k <= vocabulary
    assert made is not None or places == 1
    if not rows:
        return
    blocks, device = triton.cdiv(vocabulary, TOP_LOGPROBS_BLOCK), logits.device
    bests, masses = torch.empty(2, rows, blocks, dtype=torch.float32, device=device)
    scores = torch.empty(rows, blocks, k, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, blocks, k, dtype=torch.int32, device=device)
    shape = {"K": k, "VOCABULARY": vocabulary, "BLOCK": TOP_LOGPROBS_BLOCK}
    _survey_top_logprobs[(rows * blocks,)](
        logits, logits.stride(0), bests, masses, scores if k else bests, tokens if k else bests, **shape, num_warps=8
    )
    _note_top_logprobs[(rows,)](
        logits, logits.stride(0), picked, picked if made is None else made, bests, masses, scores if k else bests,
        tokens if k else bests, ids if k else values, values, BY_PLACE=made is not None, PLACES=places, **shape,
        num_warps=4,
    )  # fmt: skip
