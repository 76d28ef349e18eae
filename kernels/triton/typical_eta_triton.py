"""Typical-p, epsilon and eta on the device without sorting, in Triton; the reference is in ``typical_eta_torch``.

One block for each row goes over it a few times. The surprise of a token differs from what is to be expected by a
distance that its logit alone decides, so a row's tokens within some distance lie in one stretch of logits. Two scans
find that distance within an eighth of an octave. A third lists the tokens there and looks where those nearer end. Among
the few in the list the search ends.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl

from ..lists.sampling_recipes import RecipeTable

TYPICAL_ETA_BLOCK = 4096  # tokens that are looked at together
TYPICAL_ETA_WARPS = 16
LISTED_SHARE = 8  # of the vocabulary, one token in so many has room in the list

_INFINITY = tl.constexpr(float("inf"))
STAGES = tl.constexpr(3)  # of loads on their way: a scan does little else but wait for them


@triton.jit
def _read(logits, begin, low, high, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Some logits, and which of them stay."""
    token = begin + tl.arange(0, BLOCK)
    scores = tl.load(logits + token, mask=token < VOCABULARY, other=-_INFINITY).to(tl.float32)
    return scores, (token < VOCABULARY) & (scores >= low) & (scores <= high)


@triton.jit
def _mass(logits, factor, low, high, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The best of the logits that stay, the sum of their weights, and that of their weights times their log2.

    The best is infinite where a logit is NaN.
    """
    top = tl.full([BLOCK], -_INFINITY, tl.float32)
    for begin in tl.range(0, VOCABULARY, BLOCK, num_stages=STAGES):
        scores, stays = _read(logits, begin, low, high, VOCABULARY, BLOCK)
        top = tl.maximum(top, tl.where(stays, scores, tl.where(scores == scores, -_INFINITY, _INFINITY)))
    best = tl.max(top, 0)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, VOCABULARY, BLOCK, num_stages=STAGES):
        scores, stays = _read(logits, begin, low, high, VOCABULARY, BLOCK)
        exponent = tl.where(stays & (scores > -_INFINITY), (scores - best) * factor, -_INFINITY)
        weight = tl.exp2(exponent)
        total += weight
        moment += tl.where(weight > 0, weight * exponent, 0.0)
    return best, tl.sum(total.to(tl.float64), 0), tl.sum(moment.to(tl.float64), 0)


@triton.jit
def _below(distance, weight, first, step, PIVOTS: tl.constexpr, DOUBLES: tl.constexpr):
    """The weights of tokens within each of several distances: [BLOCK, PIVOTS]."""
    number = tl.arange(0, PIVOTS).to(tl.float32)
    edge = first + step * number
    if DOUBLES:
        edge = first * tl.exp2(number)
    return tl.where(distance[:, None] <= edge[None, :], weight[:, None], 0.0)


@triton.jit
def _distance(scores, stays, factor, best, middle):
    """How far each token is from the middle; infinitely far where it does not stay."""
    stays = stays & (scores > -_INFINITY)
    exponent = tl.where(stays, (scores - best) * factor, 0.0)
    return tl.where(stays, tl.abs(exponent - middle), _INFINITY)


@triton.jit
def _listed(
    logits, listed, begin, count, fits, factor, best, middle, lower, low, high,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Some logits of the list, and how far their tokens are from the middle. Of a list without room: of all tokens."""
    at = begin + tl.arange(0, BLOCK)
    scores = tl.load(listed + at, mask=fits & (at < count), other=-_INFINITY)
    if fits == 0:
        scores, stays = _read(logits, begin, low, high, VOCABULARY, BLOCK)
        scores = tl.where(stays, scores, -_INFINITY)
    distance = _distance(scores, scores > -_INFINITY, factor, best, middle)
    return scores, tl.where(distance > lower, distance, _INFINITY)


@triton.jit
def _typical(
    logits, listed, factor, best, total, middle, mass, low, high,
    ROOM: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The lowest and the highest logit within the smallest distance from the ``middle`` that holds so much mass."""
    PIVOTS: tl.constexpr = 8
    SMALL: tl.constexpr = BLOCK // 2
    target = total * mass
    # Distances double from pivot to pivot, then they are at equal steps between two of these.
    lower, upper, inside = (
        tl.full([], -1.0, tl.float32),  # a token may be right in the middle
        tl.full([], _INFINITY, tl.float32),
        tl.full([], 0.0, tl.float64),
    )
    first, step = tl.full([], 0.125, tl.float32), tl.full([], 0.0, tl.float32)
    number = tl.arange(0, PIVOTS)
    for turn in tl.static_range(2):
        sums = tl.zeros([SMALL, PIVOTS], tl.float32)
        for begin in tl.range(0, VOCABULARY, SMALL, num_stages=STAGES):
            scores, stays = _read(logits, begin, low, high, VOCABULARY, SMALL)
            stays = stays & (scores > -_INFINITY)
            exponent = tl.where(stays, (scores - best) * factor, 0.0)
            weight = tl.where(stays, tl.exp2(exponent), 0.0)
            sums += _below(tl.abs(exponent - middle), weight, first, step, PIVOTS, turn == 0)
        reached = tl.sum(sums.to(tl.float64), 0)
        edge = first + step * number.to(tl.float32)
        if turn == 0:
            edge = first * tl.exp2(number.to(tl.float32))
        enough = reached >= target
        upper = tl.minimum(upper, tl.min(tl.where(enough, edge, _INFINITY), 0))
        lower = tl.maximum(lower, tl.max(tl.where(enough, -1.0, edge), 0))
        inside = tl.maximum(inside, tl.max(tl.where(enough, 0.0, reached), 0))
        begun = tl.maximum(lower, 0.0)
        step = (tl.where(upper < _INFINITY, upper, begun + 64.0) - begun) / PIVOTS
        first = begun + step
    # The logits of tokens between the two, in a list, if there is room for all. Those nearer stay in any case.
    count = tl.full([], 0, tl.int32)
    least = tl.full([BLOCK], _INFINITY, tl.float32)
    most = tl.full([BLOCK], -_INFINITY, tl.float32)
    for begin in tl.range(0, VOCABULARY, BLOCK, num_stages=STAGES):
        scores, stays = _read(logits, begin, low, high, VOCABULARY, BLOCK)
        distance = _distance(scores, stays, factor, best, middle)
        nearer = distance <= lower
        least = tl.minimum(least, tl.where(nearer, scores, _INFINITY))
        most = tl.maximum(most, tl.where(nearer, scores, -_INFINITY))
        between = (distance <= upper) & (distance > lower) & (distance < _INFINITY)
        place = count + tl.cumsum(between.to(tl.int32), 0) - 1
        tl.store(listed + place, scores, mask=between & (place < ROOM))
        count += tl.sum(between.to(tl.int32), 0)
    lowest, highest = tl.min(least, 0), tl.max(most, 0)
    tl.debug_barrier()  # other threads read the list
    fits = count <= ROOM
    count = tl.where(fits, count, VOCABULARY)
    # Bisection by the place of a distance among all floats: it ends at the distance of a token.
    under = tl.where(lower < 0, -1, lower.to(tl.int32, bitcast=True))
    over = upper.to(tl.int32, bitcast=True)
    while over - under > 1:
        half = under + (over - under) // 2
        reach = half.to(tl.float32, bitcast=True)
        within = tl.zeros([BLOCK], tl.float32)
        at_first = tl.full([], 0, tl.int32)
        while at_first < count:
            scores, distance = _listed(
                logits, listed, at_first, count, fits, factor, best, middle, lower, low, high, VOCABULARY, BLOCK
            )  # fmt: skip
            within += tl.where(distance <= reach, tl.exp2((scores - best) * factor), 0.0)
            at_first += BLOCK
        is_enough = inside + tl.sum(within.to(tl.float64), 0) >= target
        over = tl.where(is_enough, half, over)
        under = tl.where(is_enough, under, half)
    edge = over.to(tl.float32, bitcast=True)
    least = tl.full([BLOCK], _INFINITY, tl.float32)
    most = tl.full([BLOCK], -_INFINITY, tl.float32)
    begin_again = tl.full([], 0, tl.int32)
    while begin_again < count:
        scores, distance = _listed(
            logits, listed, begin_again, count, fits, factor, best, middle, lower, low, high, VOCABULARY, BLOCK
        )  # fmt: skip
        near = (distance <= edge) & (distance < _INFINITY)
        least = tl.minimum(least, tl.where(near, scores, _INFINITY))
        most = tl.maximum(most, tl.where(near, scores, -_INFINITY))
        begin_again += BLOCK
    return tl.minimum(lowest, tl.min(least, 0)), tl.maximum(highest, tl.max(most, 0))


@triton.jit
def _likelier(logits, factor, best, total, share, low, high, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest logit whose token has at least this share (its log2) of the mass; at most that of the best."""
    edge = share + tl.log2(total.to(tl.float32))
    least = tl.full([BLOCK], _INFINITY, tl.float32)
    for begin in tl.range(0, VOCABULARY, BLOCK, num_stages=STAGES):
        scores, stays = _read(logits, begin, low, high, VOCABULARY, BLOCK)
        likely = stays & ((scores - best) * factor >= edge)
        least = tl.minimum(least, tl.where(likely, scores, _INFINITY))
    return tl.maximum(low, tl.minimum(tl.min(least, 0), best))


@triton.jit(do_not_specialize_on_alignment=["which", "threshold"])
def _typical_eta(
    logits, row_stride, which, factors, typical_eta, recipes, threshold, listed, out_low, out_high,
    BY_ROW: tl.constexpr,
    CUT: tl.constexpr,
    ROOM: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    recipe = 0
    if BY_ROW:
        recipe = tl.load(which + row)
    low = tl.full([], -_INFINITY, tl.float32)
    high = tl.full([], _INFINITY, tl.float32)
    if CUT:
        low = tl.load(threshold + row)
    typical, epsilon, eta = (
        tl.load(typical_eta + recipe), tl.load(typical_eta + recipes + recipe),
        tl.load(typical_eta + 2 * recipes + recipe),
    )  # fmt: skip
    if (typical > 0) | (epsilon > 0) | (eta > 0):
        factor = tl.load(factors + recipe)
        logits += row.to(tl.int64) * row_stride
        best, total, moment = _mass(logits, factor, low, high, VOCABULARY, BLOCK)
        # NaN where a logit is NaN or infinite, or all are -inf: the draw sees to these.
        if (best > -_INFINITY) & (best < _INFINITY) & (total == total):
            if typical > 0:
                middle = (moment / total).to(tl.float32)
                low, high = _typical(
                    logits, listed + row.to(tl.int64) * ROOM, factor, best, total, middle, typical, low, high,
                    ROOM, VOCABULARY, BLOCK,
                )  # fmt: skip
                if (epsilon > 0) | (eta > 0):
                    best, total, moment = _mass(logits, factor, low, high, VOCABULARY, BLOCK)
            if epsilon > 0:
                low = _likelier(logits, factor, best, total, tl.log2(epsilon), low, high, VOCABULARY, BLOCK)
                if eta > 0:
                    best, total, moment = _mass(logits, factor, low, high, VOCABULARY, BLOCK)
            if eta > 0:
                share = tl.log2(eta)
                entropy = tl.log2(total.to(tl.float32)) - (moment / total).to(tl.float32)
                low = _likelier(
                    logits, factor, best, total, tl.minimum(share, share * 0.5 - entropy), low, high, VOCABULARY, BLOCK
                )
    tl.store(out_low + row, low)
    tl.store(out_high + row, high)


def typical_eta_cuts(
    logits: torch.Tensor,  # [rows, vocabulary]
    table: RecipeTable,
    which: torch.Tensor | None,  # [rows] int32  each row's recipe; None: all have the first
    threshold: torch.Tensor | None = None,  # [rows] float32  tokens with a logit below it have been cut off before
) -> tuple[torch.Tensor, torch.Tensor]:  # [rows] float32, twice
    """The lowest and the highest logit that stay after typical-p, epsilon and eta one after the other.

    Typical-p keeps the tokens whose surprise is nearest to what is to be expected, until their mass reaches it. Epsilon
    keeps tokens at least that likely, and so does eta, which is lower where the distribution is flat; both keep the
    best. Rows that hold NaN or infinity, or nothing but -inf, are left as they are.
    Masses are sums of float32 weights: a token whose distance from an edge is less than about 1e-6 of what it is may
    lie on either side.
    """
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    low, high = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    if rows:
        typical_eta = table.typical_eta
        room = triton.cdiv(vocabulary, LISTED_SHARE)
        listed = torch.empty(rows if table.has_typical else 1, room, dtype=torch.float32, device=logits.device)
        _typical_eta[(rows,)](
            logits, logits.stride(0), low if which is None else which, table.numbers.factor, typical_eta,
            typical_eta.shape[1], low if threshold is None else threshold, listed, low, high,
            BY_ROW=which is not None, CUT=threshold is not None, ROOM=room, VOCABULARY=vocabulary,
            BLOCK=TYPICAL_ETA_BLOCK, num_warps=TYPICAL_ETA_WARPS,
        )  # fmt: skip
    return low, high
