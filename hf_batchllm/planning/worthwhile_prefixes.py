"""The radix tree over a sorted list of prompts, and which of its nodes are worth a segment. Plain CPU, no recursion.

The tree holds the prompts *without their last token*: every prompt must compute at least that one by itself, for its
logits. So two equal prompts share all tokens but one, and a prompt that is a prefix of another shares all but its last.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ID = 4  # bytes of an id


def shared_lengths(rows: Sequence[bytes]) -> list[int]:
    """For sorted ``rows`` of int32 ids: how many ids each shares with the row before it (0 for the first).

    Sorted rows often share as much as the two before them did. That is looked at first, without NumPy, whose calls take
    longer than comparing hundreds of ids.
    """
    shared = [0] * len(rows)
    last = 0  # bytes
    for place in range(1, len(rows)):
        above, below = rows[place - 1], rows[place]
        limit = min(len(above), len(below)) - _ID
        if limit <= 0:
            continue
        is_last = last < limit and above[last : last + _ID] != below[last : last + _ID]
        if (is_last or last == limit) and below.startswith(above[:last]):
            shared[place] = last // _ID
            continue
        differs = np.frombuffer(above, np.int32)[: limit // _ID] != np.frombuffer(below, np.int32)[: limit // _ID]
        first = int(differs.argmax())
        shared[place] = first if differs[first] else limit // _ID
        last = shared[place] * _ID
    return shared


@dataclass(slots=True)
class RadixTree:
    """A node is a prefix after which at least two branches part. Its members are neighbours in the sorted list."""

    depth: list[int]  # [nodes] tokens of the prefix, from the first one
    parent: list[int]  # [nodes] -1 at the top
    first: list[int]  # [nodes] first member
    last: list[int]  # [nodes] last member
    leaf_parent: list[int]  # [rows] the deepest node that a row belongs to, -1 for none
    bottom_up: list[int]  # the nodes, each after all nodes below it


def build_tree(shared: Sequence[int]) -> RadixTree:
    """The tree of sorted rows of which row ``place`` shares ``shared[place]`` tokens with the row before."""
    tree = RadixTree([], [], [], [], [], [])
    depth = tree.depth
    path: list[int] = []  # nodes open at this row, top first

    def open_node(at: int, first: int) -> None:
        depth.append(at)
        tree.parent.append(-1)
        tree.first.append(first)
        tree.last.append(-1)
        path.append(len(depth) - 1)

    for place in range(len(shared)):
        ahead = shared[place + 1] if place + 1 < len(shared) else 0
        if ahead > (depth[path[-1]] if path else 0):
            open_node(ahead, place)
        tree.leaf_parent.append(path[-1] if path else -1)
        while path and depth[path[-1]] > ahead:
            node = path.pop()
            tree.last[node] = place
            tree.bottom_up.append(node)
            if ahead > (depth[path[-1]] if path else 0):
                open_node(ahead, tree.first[node])  # the next row parts from this node's edge half-way
            tree.parent[node] = path[-1] if path else -1
    return tree


def nearest_kept(tree: RadixTree, lengths: Sequence[int] | np.ndarray, fee: int) -> list[int]:
    """For each node the nearest kept node, itself or above (-1 for none), in the cheapest choice of nodes to keep.

    A kept node costs ``fee`` and the tokens between its nearest kept ancestor's end and its own depth, once. A row
    costs its tokens after its nearest kept ancestor's end. The total cost is minimal; on a tie the node is kept.

    A node's own choice depends on one thing above it: where the nearest kept ancestor ends. So one pass upwards finds,
    for each node, the smallest such end at which it is better dissolved, and one pass downwards applies it.
    """
    row_tokens = np.zeros(len(tree.depth), np.int64)
    row_count = np.zeros(len(tree.depth), np.int64)
    leaf_parent = np.asarray(tree.leaf_parent, np.int64)
    in_a_node = leaf_parent >= 0
    np.add.at(row_tokens, leaf_parent[in_a_node], np.asarray(lengths, np.int64)[in_a_node])
    np.add.at(row_count, leaf_parent[in_a_node], 1)

    curves: list[_CostCurve | None] = [
        _CostCurve(tokens, -count) for tokens, count in zip(row_tokens.tolist(), row_count.tolist(), strict=True)
    ]
    dissolve_from = [0] * len(tree.depth)
    for node in tree.bottom_up:
        curve, depth, parent = curves[node], tree.depth[node], tree.parent[node]
        curves[node] = None
        assert curve is not None, "a node comes once, after those below it"
        dissolve_from[node] = curve.offer_to_keep(depth + fee + curve.at_end(depth))
        if parent >= 0:
            curve.shorten(tree.depth[parent])
            above = curves[parent]
            assert above is not None, "a node comes before its parent"
            above.add(curve)

    nearest = [-1] * len(tree.depth)
    for node in reversed(tree.bottom_up):
        parent = tree.parent[node]
        above_kept = nearest[parent] if parent >= 0 else -1
        end = tree.depth[above_kept] if above_kept >= 0 else 0
        nearest[node] = node if end < dissolve_from[node] else above_kept
    return nearest


class _CostCurve:
    """The least cost of everything below a node, as a function of ``end``: where the nearest kept ancestor ends.

    Over the whole numbers from 0 to the node's depth it is a chain of lines. The first line is ``intercept + slope *
    end``. At each of the sorted ``turns``, ``changes`` says how much intercept and slope change from there on. The last
    line is stored as well: it is the sum of the first line and all changes. A slope is minus the number of units (rows,
    kept nodes) that would pay for one token more, so every line falls by at least 1.

    The curve is cut off at the parent's depth, so it never has more turns than a row below has tokens: inserting into a
    plain sorted list costs no more than reading that row. Of two curves, the smaller is merged into the larger.
    """

    __slots__ = ("changes", "intercept", "last_intercept", "last_slope", "slope", "turns")

    def __init__(self, intercept: int, slope: int) -> None:
        self.intercept = self.last_intercept = intercept
        self.slope = self.last_slope = slope
        self.turns: list[int] = []
        self.changes: dict[int, tuple[int, int]] = {}

    def at_end(self, end: int) -> int:
        """The value at the right end of the curve, which is ``end``."""
        return self.last_intercept + self.last_slope * end

    def shorten(self, end: int) -> None:
        """Forget the curve beyond ``end``."""
        keep = bisect_right(self.turns, end)
        for turn in self.turns[keep:]:
            intercept, slope = self.changes.pop(turn)
            self.last_intercept -= intercept
            self.last_slope -= slope
        del self.turns[keep:]

    def add(self, other: _CostCurve) -> None:
        """Become the sum of both. ``other`` is used up: its storage may become part of the sum."""
        self.intercept += other.intercept
        self.slope += other.slope
        self.last_intercept += other.last_intercept
        self.last_slope += other.last_slope
        if len(other.turns) > len(self.turns):
            self.turns, other.turns = other.turns, self.turns
            self.changes, other.changes = other.changes, self.changes
        for turn, (intercept, slope) in other.changes.items():
            if turn in self.changes:
                old_intercept, old_slope = self.changes[turn]
                self.changes[turn] = (old_intercept + intercept, old_slope + slope)
            else:
                self.changes[turn] = (intercept, slope)
                insort(self.turns, turn)

    def offer_to_keep(self, cost: int) -> int:
        """Become the minimum of itself and the line ``cost - end``; returns the first ``end`` where it stays itself.

        At least two units are below a node, so each line here falls by 2 or more and the curve crosses the new line
        once. Up to there the curve becomes the new line, and the turns before are removed.
        """
        intercept, slope = self.intercept, self.slope
        crossing, covered = 0, 0
        while True:
            crossing = max(crossing, (intercept - cost) // (-slope - 1) + 1)
            if covered == len(self.turns) or crossing < self.turns[covered]:
                break
            crossing = self.turns[covered]
            more_intercept, more_slope = self.changes.pop(crossing)
            intercept += more_intercept
            slope += more_slope
            covered += 1
        if crossing > 0:
            self.turns[:covered] = [crossing]
            self.changes[crossing] = (intercept - cost, slope + 1)
            self.intercept, self.slope = cost, -1
        return crossing
