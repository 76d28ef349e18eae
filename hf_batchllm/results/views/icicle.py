"""The layout of a plan's picture: blocks for segments that many prompts share, columns for the rest.

Prompts stand side by side in the order they run; their tokens go downwards. So a segment is as wide as it has members
and as tall as it has tokens, and areas are tokens asked for. Prompts too narrow to be seen are folded: neighbours make
one column with their average, so areas stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .style import SHADES

MOST_BLOCKS = 300
MOST_COLUMNS = 300
_NARROWEST = 1 / 300  # share of the whole width; narrower segments are folded
_CUT_AT_MOST = 0.02  # share of the width that may be cut off at the bottom, to make the rest readable
_MUCH_LONGER = 2.5  # times the longest of the others: from here on prompts are cut off


@dataclass(frozen=True, eq=False)
class Icicle:
    """Horizontal places count prompts in run order; vertical levels count tokens."""

    blocks: np.ndarray  # [blocks] indices of segments; parents before children
    block_left: np.ndarray  # [blocks] place of the first member

    first: np.ndarray  # [columns] place of the first prompt
    size: np.ndarray  # [columns] prompts
    top: np.ndarray  # [columns] level where the last block above ends
    shared: np.ndarray  # [columns] average tokens in segments too narrow for a block
    saving: np.ndarray  # [columns] the share of ``shared`` that is not computed again
    own: np.ndarray  # [columns] average tokens that a prompt has for itself

    limit: float  # the lowest level shown
    is_cut: bool  # whether there is anything below


def icicle(segments: np.ndarray, parents: np.ndarray, order: np.ndarray, lengths: np.ndarray) -> Icicle:
    """segments: [segments, 5] parent, first prompt, start, end and members of each. The rest is as in a SharingPlan."""
    count = len(order)
    parent, prompt, start, end, members = segments.T
    left = np.argsort(order)[prompt]

    is_block = members >= _least_members(members, count)
    nearest: list[int] = []  # block of each segment: itself, or one above; -1 for none
    for at, above in enumerate(parent.tolist()):
        nearest.append(at if is_block[at] else nearest[above] if above >= 0 else -1)
    end_of = np.append(end, 0)  # index -1 stands for "no segment"
    row_above = parents[order]
    block_above = np.array([*nearest, -1], np.int64)[row_above]
    top = end_of[block_above]
    shared = end_of[row_above] - top
    own = lengths[order] - end_of[row_above]

    # A segment saves each member the share (members - 1) / members of its tokens.
    small = ~is_block
    saves = ((end - start) * (1 - 1 / np.maximum(members, 1)))[small]
    steps = np.zeros(count + 1)
    np.add.at(steps, left[small], saves)
    np.add.at(steps, left[small] + members[small], -saves)

    first = _columns(block_above)
    size = np.diff(first, append=count)
    rows = np.array([top, shared, own, np.cumsum(steps)[:-1]])
    top, shared, own, saved = np.add.reduceat(rows, first, axis=1) / size if count else rows
    saving = np.divide(saved, shared, out=np.zeros(len(size)), where=shared > 0)
    bottom = top + shared + own
    limit = _limit(bottom, size)
    is_cut = bool((bottom > limit).any())
    return Icicle(np.flatnonzero(is_block), left[is_block], first, size, top, shared, saving, own, limit, is_cut)


def _least_members(members: np.ndarray, count: int) -> int:
    """The members that make a segment a block. Its ancestors have at least as many, so blocks stand on blocks.

    Segments with the same number of members are all blocks, or none of them is.
    """
    beyond: list[int] = np.sort(members)[::-1][MOST_BLOCKS : MOST_BLOCKS + 1].tolist()  # the first one, if any
    return max(1, int(np.ceil(_NARROWEST * count)), *(number + 1 for number in beyond))


def _columns(block_above: np.ndarray) -> np.ndarray:
    """Where columns begin: wherever the block above changes, and at most MOST_COLUMNS times besides."""
    count = len(block_above)
    bucket = np.arange(count) * min(count, MOST_COLUMNS) // max(count, 1)
    return np.flatnonzero(np.diff(bucket, prepend=-1) | np.diff(block_above, prepend=-2))


def _limit(bottom: np.ndarray, size: np.ndarray) -> float:
    """The lowest level shown: the end of the longest prompt, unless a few are much longer than all others."""
    if not len(bottom):
        return 0.0
    longest_first = np.argsort(-bottom, kind="stable")
    width = np.cumsum(size[longest_first])
    total = int(width[-1])
    allowed = max(_CUT_AT_MOST * total, size[longest_first[0]] if total >= 4 and len(bottom) >= 4 else 0)
    highest = float(bottom.max())
    rest = float(bottom[longest_first[width > allowed]].max(initial=0)) or highest
    return 1.25 * rest if highest > _MUCH_LONGER * rest else highest


class Shades:
    """Which shade stands for how many prompts: more prompts have a higher one, from 1 on.

    members: how many prompts share each block of the picture. They are told apart, as far as there are shades.
    """

    def __init__(self, members: Iterable[float]) -> None:
        numbers = np.array(sorted(set(members)), float)
        groups = [group for group in np.split(numbers, _cuts(np.log(numbers))) if len(group)]
        # Few shades lie apart: two are the second and the fourth, and not two neighbours.
        steps = [(at + 0.5) * SHADES / len(groups) for at in range(len(groups))]
        self._shades = {1 + round(step - 0.5): group.tolist() for step, group in zip(steps, groups, strict=True)}

    def of(self, members: float) -> int:
        last = max(self._shades, default=1)
        return next((shade for shade, group in self._shades.items() if members <= group[-1]), last)

    def names(self) -> list[tuple[int, str]]:
        """For the legend: each shade, and the numbers that it stands for."""
        ends = {shade: sorted({group[0], group[-1]}) for shade, group in self._shades.items()}
        return [(shade, " – ".join(f"{end:,.0f}" for end in both)) for shade, both in ends.items()]


def _cuts(values: np.ndarray) -> list[int]:
    """Where to part sorted values into as many groups as there are shades, each as narrow as can be.

    The sum of squared distances to the groups' means is the least possible (Jenks' natural breaks).
    """
    count = len(values)
    if count <= SHADES:
        return list(range(1, count))
    sums, squares = (np.append(0.0, np.cumsum(each)) for each in (values, values**2))
    begin, end = np.ogrid[: count + 1, : count + 1]
    spread = squares[end] - squares[begin] - (sums[end] - sums[begin]) ** 2 / np.maximum(end - begin, 1)
    spread[begin >= end] = np.inf
    least, begins = spread[0], []  # of the values up to each end, in one group
    for _ in range(SHADES - 1):
        costs = least[:, None] + spread
        begins.append(costs.argmin(0))
        least = costs.min(0)
    cuts = [count]
    for begin_of_last in reversed(begins):
        cuts.append(int(begin_of_last[cuts[-1]]))
    return cuts[:0:-1]
