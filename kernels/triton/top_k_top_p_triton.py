"""Top-k, top-p and min-p on the device without sorting, in Triton; the reference is in ``top_k_top_p_torch``.

Top-k, top-p and min-p each keep the tokens from some score up, so one number for each row says what they keep together:
``cutoffs`` finds it, and ``gumbel_sample`` then draws no token below it.

A first pass reads the whole row in many blocks, and keeps the best score of each group of 32 tokens. The k-th best of
*these* is no better than the k-th best of all, so only groups that reach it matter: some fifty of four thousand. Within
them one block for each row narrows down a bracket; each turn tries three pivots, and finds the bracket's lowest and
highest score.

Rows may differ in their cuts. A row's result does not depend on the other rows; rows without a cut do no work.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl

from ..lists.sampling_recipes import BY_MASS, BY_RANK, BY_RATIO, Numbers, Recipe, RowRecipes

SURVEY_BLOCK = 4096  # tokens of the vocabulary
CUT_GROUP = 32  # tokens of the vocabulary whose best score is kept
CUT_LINES = 64  # groups that one block looks at together
CUT_WARPS = 8

_INFINITY = tl.constexpr(float("inf"))
_BY_RANK, _BY_MASS = tl.constexpr(BY_RANK), tl.constexpr(BY_MASS)
_ANYWHERE = ["which", "block_mass"]  # their alignment depends on the number of rows: do not compile for it
_FEW, _ALL = tl.constexpr(3), tl.constexpr(256)  # turns of a search; none takes as many as the latter


@triton.jit(do_not_specialize=["cuts"], do_not_specialize_on_alignment=_ANYWHERE)
def _survey(
    logits, row_stride, which, factor, cuts, group_best, block_best, block_mass,
    BY_ROW: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    KEEP_GROUPS: tl.constexpr,
    KEEP_MASS: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = triton.cdiv(VOCABULARY, BLOCK)
    GROUPS: tl.constexpr = triton.cdiv(VOCABULARY, GROUP)
    row = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    if BY_ROW:
        recipe = tl.load(which + row)
        factor = tl.load(factor + recipe)
        cuts = tl.load(cuts + recipe)
        if cuts == 0:  # the row has no cut
            return
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    scores = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < VOCABULARY, other=-_INFINITY)
    scores = scores.to(tl.float32)
    scores = tl.where(scores == scores, scores, _INFINITY)
    best = tl.max(scores, 1)
    if KEEP_GROUPS:
        tl.store(group_best + row.to(tl.int64) * GROUPS + group, best, mask=group < GROUPS)
    best = tl.max(best, 0)
    tl.store(block_best + row * BLOCKS + block, best)
    if KEEP_MASS and (cuts & (_BY_RANK | _BY_MASS)) == _BY_MASS:
        peak = tl.where(best == -_INFINITY, 0.0, best)  # avoids inf - inf
        mass = tl.sum(tl.exp2((scores - peak) * factor), 1)
        tl.store(block_mass + row * BLOCKS + block, tl.sum(mass, 0))


@triton.jit
def _key(score):
    """A float32's place among all of them, as an integer; and back again."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(key):
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _pivots(lower, upper, turn):
    """Three scores between two, in order: at quarters of their difference, or of the floats that lie between them.

    Quarters of the difference are quick; quarters of the floats make sure that the search ends, for any scores.
    """
    start = tl.where(lower > -_INFINITY, lower, upper)
    span = upper - start
    first, second, third = start + span * 0.25, start + span * 0.5, start + span * 0.75
    third = tl.where(third > lower, third, upper)
    low = _key(lower).to(tl.int64)
    floats = tl.maximum(_key(upper).to(tl.int64) - low, 0)
    by_place = (lower == -_INFINITY) | (turn % 4 == 3)
    first = tl.where(by_place, _score((low + floats // 4).to(tl.int32)), first)
    second = tl.where(by_place, _score((low + floats // 2).to(tl.int32)), second)
    third = tl.where(by_place, _score((low + floats - floats // 4).to(tl.int32)), third)
    return first, second, third


@triton.jit
def _scan(
    source, groups, count, length, low, high, first, second, third, best, factor,
    WEIGHTED: tl.constexpr,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """The weight of all scores from each of three pivots up, and the lowest and the highest score within [low, high).

    Scans all of ``source``, or the groups of it that are listed.
    """
    above_first = tl.zeros([LINES, GROUP], tl.float32)
    above_second = tl.zeros([LINES, GROUP], tl.float32)
    above_third = tl.zeros([LINES, GROUP], tl.float32)
    least = tl.full([LINES, GROUP], _INFINITY, tl.float32)
    most = tl.full([LINES, GROUP], -_INFINITY, tl.float32)
    begin = tl.full([], 0, tl.int32)
    while begin < count:
        line = begin + tl.arange(0, LINES)
        group = line
        if LISTED:
            group = tl.load(groups + line, mask=line < count, other=0)
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (line < count)[:, None] & (at < length)
        scores = tl.load(source + at, mask=inside, other=float("nan")).to(tl.float32)  # NaN fails every comparison
        weight = tl.full([LINES, GROUP], 1.0, tl.float32)
        if WEIGHTED:
            weight = tl.exp2((scores - best) * factor)
        above_first += tl.where(scores >= first, weight, 0.0)
        above_second += tl.where(scores >= second, weight, 0.0)
        above_third += tl.where(scores >= third, weight, 0.0)
        least = tl.minimum(least, tl.where(scores >= low, scores, _INFINITY))
        most = tl.maximum(most, tl.where(scores < high, scores, -_INFINITY))
        begin += LINES
    # Each lane adds up few numbers, and the lanes are added up in float64.
    return (
        tl.sum(tl.sum(above_first, 1).to(tl.float64), 0),
        tl.sum(tl.sum(above_second, 1).to(tl.float64), 0),
        tl.sum(tl.sum(above_third, 1).to(tl.float64), 0),
        tl.min(tl.min(least, 1), 0),
        tl.max(tl.max(most, 1), 0),
    )


@triton.jit
def _search(
    source, groups, count, length, low, high, best, target, factor, turns,
    WEIGHTED: tl.constexpr,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """The highest score within [low, high) that weighs ``target`` together with all above; ``best`` is the row's best.

    -inf if even all scores from ``low`` up weigh less. After ``turns`` turns, the bracket that is left. Sums are always
    made in the same order, so that more scores are never found to weigh less.
    """
    lower, upper = low, tl.minimum(high, best)
    turn = tl.full([], 0, tl.int32)
    while turn < turns:
        first, second, third = _pivots(lower, upper, turn)
        first = tl.where(turn == 0, low, first)
        above_first, above_second, above_third, least, most = _scan(
            source, groups, count, length, low, high, first, second, third, best, factor,
            WEIGHTED, LISTED, GROUP, LINES,
        )  # fmt: skip
        nothing = (turn == 0) & (above_first < target)
        single = least >= most
        low = tl.where(above_first >= target, first, low)
        low = tl.where(above_second >= target, second, low)
        low = tl.where(above_third >= target, third, low)
        high = tl.where(above_third < target, third, high)
        high = tl.where(above_second < target, second, high)
        high = tl.where(above_first < target, first, high)
        lower, upper = tl.maximum(low, least), tl.minimum(high, most)
        low = tl.where(nothing, -_INFINITY, tl.where(single, least, low))
        turn = tl.where(nothing | single, turns, turn + 1)
    return low, high


@triton.jit
def _list_groups(group_best, listed, low, GROUPS: tl.constexpr):
    """List the groups whose best score reaches ``low``. Returns their number."""
    group = tl.arange(0, triton.next_power_of_2(GROUPS))
    reaches = tl.load(group_best + group, mask=group < GROUPS, other=float("nan")).to(tl.float32) >= low
    tl.debug_barrier()  # other threads may still read an earlier list
    tl.store(listed + tl.cumsum(reaches.to(tl.int32), 0) - 1, group, mask=reaches)
    tl.debug_barrier()  # and are to read this one
    return tl.sum(reaches.to(tl.int32), 0)


@triton.jit
def _edge(
    logits, factor, group_best, listed, bests, masses, best, top_k, top_p, log_tail,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    VOCABULARY: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """The lowest score that top-k and top-p keep of a row; ``bests`` and ``masses`` are its blocks'."""
    GROUPS: tl.constexpr = triton.cdiv(VOCABULARY, GROUP)
    low = tl.full([], -_INFINITY, tl.float32)
    end = tl.full([], _INFINITY, tl.float32)
    lines = tl.full([], triton.cdiv(GROUPS, GROUP), tl.int32)
    # All scores together reach at least what the groups' best scores reach alone: a bound to begin with.
    if TOP_K:
        target = top_k.to(tl.float64)
        low, _ = _search(
            group_best, listed, lines, GROUPS, low, end, best, target, factor, _ALL, False, False, GROUP, LINES
        )  # fmt: skip
        count = _list_groups(group_best, listed, low, GROUPS)
        low, _ = _search(
            logits, listed, count, VOCABULARY, low, end, best, target, factor, _ALL, False, True, GROUP, LINES
        )  # fmt: skip
    if TOP_P:
        if TOP_K:
            total, _, _, _, _ = _scan(
                logits, listed, count, VOCABULARY, low, end, low, low, low, best, factor, True, True, GROUP, LINES
            )  # fmt: skip
            target = total * top_p
        else:
            total = tl.sum((masses * tl.exp2((bests - best) * factor)).to(tl.float64), 0)
            target = total * top_p  # the best score reaches 0, too
            # If every token below were as likely as this, they would still have to go; with a margin for rounding.
            low = best + (tl.log2(total.to(tl.float32)) + log_tail - 0.01) / factor
            reached, _ = _search(
                group_best, listed, lines, GROUPS, low, end, best, target, factor, _ALL, True, False, GROUP, LINES
            )  # fmt: skip
            low = tl.maximum(low, reached)
            count = _list_groups(group_best, listed, low, GROUPS)
            # That bound may be loose: a few turns give a better one.
            reached, end = _search(
                logits, listed, count, VOCABULARY, low, end, best, target, factor, _FEW, True, True, GROUP, LINES
            )  # fmt: skip
            low = tl.maximum(low, reached)
            count = _list_groups(group_best, listed, low, GROUPS)
        reached, _ = _search(
            logits, listed, count, VOCABULARY, low, end, best, target, factor, _ALL, True, True, GROUP, LINES
        )  # fmt: skip
        low = tl.maximum(low, reached)
    return low


# Not specialised, so that a top_k of 1 is a number like any other.
@triton.jit(do_not_specialize=["cuts", "top_k"], do_not_specialize_on_alignment=_ANYWHERE)
def _cut(
    logits, row_stride, which, factor, cuts, top_k, top_p, log_tail, shift, shift_rest,
    group_best, listed, block_best, block_mass, out,
    BY_ROW: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    BOTH: tl.constexpr,
    MIN_P: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """``TOP_K``: whether any row has top-k without top-p; ``TOP_P``: the other way round."""
    BLOCKS: tl.constexpr = triton.cdiv(VOCABULARY, BLOCK)
    GROUPS: tl.constexpr = triton.cdiv(VOCABULARY, GROUP)
    row = tl.program_id(0)
    if BY_ROW:
        recipe = tl.load(which + row)
        cuts = tl.load(cuts + recipe)
        if cuts == 0:
            tl.store(out + row, -_INFINITY)
            return
        factor = tl.load(factor + recipe)
        top_k = tl.load(top_k + recipe)
        top_p = tl.load(top_p + recipe)
        log_tail = tl.load(log_tail + recipe)
        shift = tl.load(shift + recipe)
        shift_rest = tl.load(shift_rest + recipe)
    logits += row.to(tl.int64) * row_stride
    group_best += row.to(tl.int64) * GROUPS
    listed += row.to(tl.int64) * GROUPS
    block = tl.arange(0, triton.next_power_of_2(BLOCKS))
    bests = tl.load(block_best + row * BLOCKS + block, mask=block < BLOCKS, other=-_INFINITY)
    best = tl.max(bests, 0)
    low = tl.full([], -_INFINITY, tl.float32)
    if (best > -_INFINITY) & (best < _INFINITY):
        kind = cuts & (_BY_RANK | _BY_MASS)
        if TOP_K and kind == _BY_RANK:
            low = _edge(
                logits, factor, group_best, listed, bests, bests, best, top_k, top_p, log_tail,
                True, False, VOCABULARY, GROUP, LINES,
            )  # fmt: skip
        if TOP_P and kind == _BY_MASS:
            masses = tl.load(block_mass + row * BLOCKS + block, mask=block < BLOCKS, other=0.0)
            low = _edge(
                logits, factor, group_best, listed, bests, masses, best, top_k, top_p, log_tail,
                False, True, VOCABULARY, GROUP, LINES,
            )  # fmt: skip
        if BOTH and kind == (_BY_RANK | _BY_MASS):
            low = _edge(
                logits, factor, group_best, listed, bests, bests, best, top_k, top_p, log_tail,
                True, True, VOCABULARY, GROUP, LINES,
            )  # fmt: skip
        if MIN_P:
            edge = best.to(tl.float64) + shift + shift_rest
            rounded = edge.to(tl.float32)
            above = _score(_key(rounded) + 1)
            low = tl.maximum(low, tl.where(rounded.to(tl.float64) < edge, above, rounded))
    tl.store(out + row, low)


def cutoffs(
    logits: torch.Tensor,  # [rows, vocabulary]
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    by_row: RowRecipes | None = None,  # in place of all of these
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [rows] float32
    """The logit from which up a row's tokens stay, after top-k, top-p and min-p one after the other, as transformers'.

    Top-k keeps all that are as good as the k-th best. Top-p keeps the fewest of the best tokens, of those that top-k
    left, whose mass reaches ``top_p``, one at least; among equals at that edge it keeps all, where transformers keeps
    some, whichever its sort puts first. Min-p keeps what is at least ``min_p`` times as likely as the best token.
    Masses are sums of float32 weights: a token whose distance from the edge of a nucleus is less than about 1e-6 of the
    row's mass may lie on either side.

    -inf where nothing is cut off, and in rows that hold NaN or infinity, or nothing but -inf: the draw sees to these.
    """
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty(rows, dtype=torch.float32, device=logits.device) if out is None else out
    if by_row is None:
        recipe = Recipe(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        numbers, which = Numbers.of(recipe, vocabulary), out
        cuts = frozenset((numbers.cuts,))
    else:
        numbers, which, cuts = by_row.table.numbers, by_row.which, by_row.table.cuts
    if rows == 0:
        return out
    if cuts == {0}:
        return out.fill_(-float("inf"))
    kinds = {each & (BY_RANK | BY_MASS) for each in cuts}
    blocks, groups = triton.cdiv(vocabulary, SURVEY_BLOCK), triton.cdiv(vocabulary, CUT_GROUP)
    kept = 0 if kinds == {0} else rows
    group_best = torch.empty(kept, groups, dtype=logits.dtype, device=logits.device)
    listed = torch.empty(kept, groups, dtype=torch.int32, device=logits.device)
    block_best, block_mass = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    shape = {"BY_ROW": by_row is not None, "VOCABULARY": vocabulary, "BLOCK": SURVEY_BLOCK, "GROUP": CUT_GROUP}
    _survey[(rows * blocks,)](
        logits, logits.stride(0), which, numbers.factor, numbers.cuts, group_best, block_best, block_mass, **shape,
        KEEP_GROUPS=kept > 0, KEEP_MASS=BY_MASS in kinds, num_warps=4,
    )  # fmt: skip
    _cut[(rows,)](
        logits, logits.stride(0), which, *numbers, group_best, listed, block_best, block_mass, out, **shape,
        TOP_K=BY_RANK in kinds, TOP_P=BY_MASS in kinds, BOTH=BY_RANK | BY_MASS in kinds,
        MIN_P=any(each & BY_RATIO for each in cuts), LINES=CUT_LINES, num_warps=CUT_WARPS,
    )  # fmt: skip
    return out
