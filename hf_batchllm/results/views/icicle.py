"""The layout of a plan's picture: blocks for segments that many prompts share, columns for the rest.

Prompts stand side by side in the order they run; their tokens go downwards. So a segment is as wide as it has members
and as tall as it has tokens, and areas are tokens asked for. Prompts too narrow to be seen are folded: neighbours make
one column with their average, so areas stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .protocols import ShownPlan

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

    prompts: int
    limit: float  # the lowest level shown
    longest: int  # tokens of the longest prompt

    @property
    def bottom(self) -> np.ndarray:
        bottom: np.ndarray = self.top + self.shared + self.own
        return bottom

    @property
    def is_cut(self) -> bool:
        return bool((self.bottom > self.limit).any())


def icicle(plan: ShownPlan) -> Icicle:
    count = len(plan.order)
    order = np.asarray(plan.order, np.int64)
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    fields = [(s.parent, s.prompt, s.start, s.end, s.members) for s in plan.segments]
    parent, prompt, start, end, members = np.array(fields, np.int64).reshape(-1, 5).T
    left = place[prompt]

    is_block = members >= _least_members(members, count)
    last_block = _nearest(is_block, parent)
    end_of = np.append(end, 0)  # index -1 stands for "no segment"
    row_above = np.asarray(plan.parents, np.int64)[order]
    block_above = np.append(last_block, -1)[row_above]
    top = end_of[block_above]
    shared = end_of[row_above] - top
    own = np.asarray(plan.lengths, np.int64)[order] - end_of[row_above]

    # A segment saves each member the share (members - 1) / members of its tokens.
    small = ~is_block
    saves = (end - start) * (1 - 1 / np.maximum(members, 1))
    steps = np.zeros(count + 1)
    np.add.at(steps, left[small], saves[small])
    np.add.at(steps, left[small] + members[small], -saves[small])
    saved = np.cumsum(steps)[:count]

    begins = _columns(block_above, count)
    size = np.diff(begins, append=count)
    mean = [np.add.reduceat(row, begins) / size if count else np.zeros(0) for row in (shared, saved, own)]
    saving = np.divide(mean[1], mean[0], out=np.zeros(len(size)), where=mean[0] > 0)
    blocks = np.flatnonzero(is_block)
    columns = (begins, size, top[begins].astype(float), mean[0], saving, mean[2])
    bottom = columns[2] + mean[0] + mean[2]
    limit = _limit(bottom, size)
    longest = int(plan.lengths.max()) if count else 0
    return Icicle(blocks, left[blocks], *columns, prompts=count, limit=limit, longest=longest)


def _least_members(members: np.ndarray, count: int) -> int:
    """The members that make a segment a block. Its ancestors have at least as many, so blocks stand on blocks."""
    least = max(1, int(np.ceil(_NARROWEST * count)))
    wide = np.sort(members[members >= least])[::-1]
    # Segments with the same number of members are all blocks, or none of them is.
    return least if len(wide) <= MOST_BLOCKS else int(wide[MOST_BLOCKS]) + 1


def _nearest(is_block: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """For each segment the nearest block: itself or an ancestor; -1 for none."""
    step = np.append(np.where(is_block, np.arange(len(parent)), parent), -1)
    while True:
        further = step[step]
        if (further == step).all():
            return step[:-1]
        step = further


def _columns(block_above: np.ndarray, count: int) -> np.ndarray:
    """Where columns begin: wherever the block above changes, and at most MOST_COLUMNS times besides."""
    if not count:
        return np.zeros(0, np.int64)
    bucket = np.arange(count) * min(count, MOST_COLUMNS) // count
    new = (np.diff(bucket) != 0) | (np.diff(block_above) != 0)
    return np.append(0, np.flatnonzero(new) + 1)


def _limit(bottom: np.ndarray, size: np.ndarray) -> float:
    """The lowest level shown: the end of the longest prompt, unless a few are much longer than all others."""
    if not len(bottom):
        return 0.0
    longest_first = np.argsort(-bottom, kind="stable")
    width = np.cumsum(size[longest_first])
    total = int(width[-1])
    allowed = max(_CUT_AT_MOST * total, size[longest_first[0]] if total >= 4 and len(bottom) >= 4 else 0)
    others = longest_first[width > allowed]
    highest = float(bottom.max())
    rest = float(bottom[others].max()) if len(others) else highest
    return 1.25 * rest if highest > _MUCH_LONGER * rest else highest
