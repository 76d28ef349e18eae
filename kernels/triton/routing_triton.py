"""Which experts a token meets, and which rows an expert gets; the references are in ``routing_torch``.

A router's own code runs some ten small kernels after its product. Here it is one: each block chooses for some tokens
and enters them with their experts, and the last block to be done cuts the experts' rows into tiles. The second kernel
does the same for experts that other code has chosen.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl

from ..reference.routing_torch import SCORES, SHARES, Choice, RowsOfExperts, Rule, most_tiles

_SOFTMAX, _SIGMOID, _LOGITS = (tl.constexpr(SCORES.index(name)) for name in SCORES)
_NORMALISED, _SOFTMAX_OF_CHOSEN, _SIGMOIDS, _NORMALISED_SIGMOIDS = (
    tl.constexpr(SHARES.index(name)) for name in SHARES[1:]
)
_PAIRS = 256  # for each block of ``rows_of_experts``
_TOKENS = 4  # for each block of ``choose``


@triton.jit
def _cut_tiles(counts, tiles, most, EXPERTS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):
    """By the last block to be done; its counter stands behind the counts."""
    tl.debug_barrier()  # all counts of the block are out before it says that it is done
    done = tl.atomic_add(counts + EXPERTS, 1, sem="acq_rel")
    if done == tl.num_programs(0) - 1:
        expert = tl.arange(0, PADDED)
        rows = tl.load(counts + expert, mask=expert < EXPERTS, other=0, cache_modifier=".cg")
        own = (rows + TILE - 1) // TILE
        first = tl.cumsum(own, 0) - own
        most_of_one = tl.max(own, 0)
        nth = 0
        while nth < most_of_one:
            place = tiles + (first + nth) * 2
            tl.store(place, expert, mask=nth < own)
            tl.store(place + 1, nth * TILE, mask=nth < own)
            nth += 1
        rest = tl.sum(own, 0)
        while rest < most:
            tl.store(tiles + (rest + expert) * 2, -1, mask=rest + expert < most)
            rest += PADDED


@triton.jit
def _enter(pairs, counts, pair, expert, room, inside):
    # Where a pair comes among its expert's does not matter: a row of a product does not depend on the rows beside it.
    place = tl.atomic_add(counts + expert, 1, mask=inside, sem="relaxed")
    tl.store(pairs + expert.to(tl.int64) * room + place, pair, mask=inside)


# Sizes that change with each step would otherwise be compiled for twice: as multiples of 16 and as others.
_ANY_SIZE = ["tokens", "n_pairs", "most"]


@triton.jit(do_not_specialize=_ANY_SIZE)
def _rows_of_experts(
    indices, pairs, counts, tiles,
    n_pairs, most, row_step, step,
    TOP: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(indices + pair // TOP * row_step + pair % TOP * step, mask=pair < n_pairs, other=-1).to(tl.int32)
    # Any token may have chosen the same expert several times: there is room for all.
    _enter(pairs, counts, pair, expert, n_pairs, (expert >= 0) & (expert < EXPERTS))
    _cut_tiles(counts, tiles, most, EXPERTS, PADDED, TILE)


def rows_of_experts(indices: torch.Tensor, experts: int, tile: int) -> RowsOfExperts:
    top, total = indices.shape[1], indices.numel()
    pairs, counts, tiles = _empty(indices, experts, tile, total, total)
    _rows_of_experts[(triton.cdiv(total, _PAIRS),)](
        indices, pairs, counts, tiles, total, len(tiles), *indices.stride(),
        TOP=top, EXPERTS=experts, PADDED=triton.next_power_of_2(experts), TILE=tile, BLOCK=_PAIRS,
    )  # fmt: skip
    return RowsOfExperts(pairs, counts[:experts], tiles, tile, total, whole=False)


def _empty(like: torch.Tensor, experts: int, tile: int, total: int, most_of_one: int) -> tuple[torch.Tensor, ...]:
    pairs = like.new_empty(experts, most_of_one, dtype=torch.int32)
    counts = like.new_zeros(experts + 1, dtype=torch.int32)
    return pairs, counts, like.new_empty(most_tiles(total, experts, tile), 2, dtype=torch.int32)


@triton.jit
def _best(values, columns, left):
    """In each row the largest value of those left, and its column: the first of equals."""
    best = tl.max(tl.where(left, values, float("-inf")), 1, keep_dims=True)
    return best, tl.min(tl.where(left & (values == best), columns, 1 << 30), 1, keep_dims=True)


@triton.jit(do_not_specialize=_ANY_SIZE)
def _choose(
    logits, bias, scales, pairs, counts, tiles, indices, shares,
    tokens, most, row_step, least_sum, added_to_sum, factor,
    SCORE: tl.constexpr, SHARE: tl.constexpr, TOP: tl.constexpr, TOP_PADDED: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    TILE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    expert = tl.arange(0, PADDED)[None, :]
    known = (token < tokens) & (expert < EXPERTS)
    given = tl.load(logits + token.to(tl.int64) * row_step + expert, mask=known, other=0.0).to(tl.float32)
    if SCORE == _SOFTMAX:
        given = tl.where(expert < EXPERTS, given, float("-inf"))
        score = tl.exp(given - tl.max(given, 1, keep_dims=True))
        score = score / tl.sum(score, 1, keep_dims=True)
    elif SCORE == _SIGMOID:
        score = 1 / (1 + tl.exp(-given))
    else:
        score = given
    compared = score
    if bias is not None:
        compared += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    compared = tl.where(compared == compared, compared, float("inf"))  # NaN comes first, as it does in PyTorch
    compared = tl.where(expert < EXPERTS, compared, float("-inf"))
    if GROUPS > 1:
        group = expert // (EXPERTS // GROUPS)
        value = tl.full((TOKENS, PADDED), float("-inf"), tl.float32)  # of the group of each expert
        for nth in tl.static_range(GROUPS):
            inside = (group == nth) & (expert < EXPERTS)
            best, at = _best(compared, expert, inside)
            if GROUP_BEST == 2:
                best += tl.max(tl.where(inside & (expert != at), compared, float("-inf")), 1, keep_dims=True)
            value = tl.where((group == nth) & (expert < EXPERTS), best, value)
        allowed = expert < 0
        for _ in tl.static_range(TOP_GROUPS):
            _value, at = _best(value, expert, (expert < EXPERTS) & (allowed == 0))
            allowed = allowed | (group == at // (EXPERTS // GROUPS))
        compared = tl.where(allowed, compared, float("-inf"))
    nth = tl.arange(0, TOP_PADDED)[None, :]
    chosen = tl.zeros((TOKENS, TOP_PADDED), tl.int32)
    share = tl.zeros((TOKENS, TOP_PADDED), tl.float32)
    left = expert < EXPERTS
    for n in tl.static_range(TOP):
        _value, at = _best(compared, expert, left)
        left = left & (expert != at)
        chosen = tl.where(nth == n, at, chosen)
        share = tl.where(nth == n, tl.sum(tl.where(expert == at, score, 0.0), 1, keep_dims=True), share)
    if (SHARE == _SIGMOIDS) | (SHARE == _NORMALISED_SIGMOIDS):
        share = tl.where(nth < TOP, 1 / (1 + tl.exp(-share)), 0.0)
    if (SHARE == _NORMALISED) | (SHARE == _NORMALISED_SIGMOIDS):
        share = share / tl.maximum(tl.sum(share, 1, keep_dims=True) + added_to_sum, least_sum)
    elif SHARE == _SOFTMAX_OF_CHOSEN:
        share = tl.where(nth < TOP, share, float("-inf"))
        share = tl.exp(share - tl.max(share, 1, keep_dims=True))
        share = share / tl.sum(share, 1, keep_dims=True)
    share = share * factor
    inside = (token < tokens) & (nth < TOP)
    if scales is not None:
        share = share * tl.load(scales + chosen, mask=inside, other=0.0).to(tl.float32)
    pair = token * TOP + nth
    tl.store(indices + pair, chosen, mask=inside)
    tl.store(shares + pair, share.to(shares.dtype.element_ty), mask=inside)
    _enter(pairs, counts, pair, chosen, tokens, inside)
    _cut_tiles(counts, tiles, most, EXPERTS, PADDED, TILE)


def choose(
    logits: torch.Tensor,
    rule: Rule,
    tile: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[Choice, RowsOfExperts]:
    tokens, experts = logits.shape
    if not rule.fits(experts):
        raise ValueError(f"{rule} cannot choose from {experts} experts")
    logits = logits.contiguous()
    bias, scales = (None if each is None else each.contiguous() for each in (bias, scales))
    pairs, counts, tiles = _empty(logits, experts, tile, tokens * rule.top, tokens)
    indices = logits.new_empty(tokens, rule.top, dtype=torch.int64)
    shares = logits.new_empty(tokens, rule.top, dtype=dtype)
    _choose[(triton.cdiv(tokens, _TOKENS),)](
        logits, bias, scales, pairs, counts, tiles, indices, shares,
        tokens, len(tiles), logits.stride(0), rule.least_sum, rule.added_to_sum, rule.factor,
        SCORE=SCORES.index(rule.score), SHARE=SHARES.index(rule.share), TOP=rule.top,
        TOP_PADDED=triton.next_power_of_2(rule.top), GROUPS=rule.groups, TOP_GROUPS=rule.top_groups,
        GROUP_BEST=rule.group_best, EXPERTS=experts, PADDED=triton.next_power_of_2(experts), TILE=tile, TOKENS=_TOKENS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return Choice(indices, shares), RowsOfExperts(pairs, counts[:experts], tiles, tile, tokens * rule.top, whole=True)
