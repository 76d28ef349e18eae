"""A plan -> pieces for several processes that run one list together, each with a whole model.

A piece is some prompts that stand side by side in the plan. Prompts that share a prefix stay together, and are parted
only where the prefix, computed once more, costs less than processes that wait. No model and no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..results.sharing_plan import SharingPlan

# Pieces of a process, or a few more: what one process may take over from another is a whole piece.
_PIECES = 32
_EXACT = 1.005  # the time of the split is sought up to this factor


@dataclass(frozen=True)
class TokenCosts:
    """What tokens cost, in tokens of prompts.

    An answer token is run like a token of a prompt, and all keys and values that it sees are read. A prefix is read
    once for all answers that share it.
    """

    key: float = 0.001  # of reading a key and its value


@dataclass(frozen=True)
class Piece:
    """Prompts that one process runs. ``own``: what they cost beside ``above``."""

    prompts: list[int]  # numbers in the plan's list, in run order
    own: float
    above: tuple[int, ...] = ()  # segments that they share with other pieces, and that each process computes for itself


@dataclass
class Split:
    """Which process runs which pieces at first, and how long that is expected to take."""

    pieces: list[Piece]
    shares: list[list[int]]  # of each process, the numbers of its pieces, in run order
    costs: list[float]  # of each process
    segment_costs: Sequence[float] = field(repr=False, default=())

    @property
    def longest(self) -> float:
        return max(self.costs, default=0.0)

    def cost(self, piece: int) -> float:
        """By itself, in a process that has computed nothing yet."""
        mine = self.pieces[piece]
        return mine.own + sum(self.segment_costs[segment] for segment in mine.above)

    def half_of(self, pieces: Sequence[int], left: float) -> list[int]:
        """The last of the pieces: as many as take another process no longer than the rest takes this one.

        The other has to compute what they have in common with the rest once more. ``left``: of all that this one has.
        """
        wanted: list[int] = []
        above: set[int] = set()
        taken = 0.0
        for number in reversed(pieces):
            piece = self.pieces[number]
            more = piece.own + sum(self.segment_costs[each] for each in piece.above if each not in above)
            if taken + more > left - piece.own:
                break
            wanted.append(number)
            above.update(piece.above)
            taken, left = taken + more, left - piece.own
        return wanted


def split_plan(
    plan: SharingPlan,
    new_tokens: Sequence[int],  # of each prompt, in all of its samples
    processes: int,
    costs: TokenCosts | None = None,
    samples: Sequence[int] | None = None,  # of each prompt
) -> Split:
    """The split after which the last process is expected to end first."""
    tree = _Tree(plan, new_tokens, costs or TokenCosts(), samples)
    return _Shares(tree.pieces(tree.whole / (processes * _PIECES)), tree.segment_costs, processes).split()


class _Tree:
    """A plan's segments with the prompts and segments right above them, in run order, and what all of them cost."""

    def __init__(
        self, plan: SharingPlan, new_tokens: Sequence[int], costs: TokenCosts, samples: Sequence[int] | None
    ) -> None:
        self._plan = plan
        count = len(plan.order)
        times = np.ones(count) if samples is None else np.asarray(samples, np.float64)
        answers = np.asarray(new_tokens, np.float64)
        ends = np.array([segment.end for segment in plan.segments] + [0], np.float64)  # the 0 stands for no segment
        own = plan.lengths - ends[plan.parents]
        # A sample of a prompt is computed from the last token on; the rest is shared by all samples.
        longest = np.divide(answers, np.maximum(times, 1))
        self.prompt_costs = own + answers + costs.key * (answers * longest / 2 + own * longest)
        self._most = self._longest_answers(longest)
        lengths = np.array([len(segment) for segment in plan.segments], np.float64)
        self.segment_costs: list[float] = (lengths * (1 + costs.key * self._most)).tolist()
        self._children, self._roots = self._ordered()

    def _longest_answers(self, longest: np.ndarray) -> np.ndarray:
        """The steps in which each segment is read."""
        most = np.zeros(len(self._plan.segments))
        parents = self._plan.parents
        inside = parents >= 0
        np.maximum.at(most, parents[inside], longest[inside])
        for segment in reversed(self._plan.segments):
            if segment.parent >= 0:
                most[segment.parent] = max(most[segment.parent], most[segment.index])
        return most

    def _ordered(self) -> tuple[list[list[int]], list[int]]:
        """What stands right on each segment, and on none: a prompt by its number, a segment by ``~index``."""
        plan = self._plan
        children: list[list[int]] = [[] for _ in plan.segments]
        roots: list[int] = []
        met = [False] * len(plan.segments)
        for prompt in plan.order.tolist():
            node, at = prompt, int(plan.parents[prompt])
            while True:
                (children[at] if at >= 0 else roots).append(node)
                if at < 0 or met[at]:
                    break
                met[at] = True
                node, at = ~at, plan.segments[at].parent
        return children, roots

    @cached_property
    def _totals(self) -> list[float]:
        """The cost of each segment with all that stands on it."""
        totals = list(self.segment_costs)
        for segment in reversed(self._plan.segments):  # a parent comes before its children
            totals[segment.index] += sum(
                self.prompt_costs[node] if node >= 0 else totals[~node] for node in self._children[segment.index]
            )
        return totals

    @cached_property
    def whole(self) -> float:
        return float(sum(self.total(node) for node in self._roots))

    def total(self, node: int) -> float:
        return float(self.prompt_costs[node]) if node >= 0 else self._totals[~node]

    def prompts(self, node: int) -> list[int]:
        """The prompts of a node, in run order."""
        if node >= 0:
            return [node]
        segment = self._plan.segments[~node]
        first = self._places[segment.prompt]
        found: list[int] = self._plan.order[first : first + segment.members].tolist()
        return found

    @cached_property
    def _places(self) -> np.ndarray:
        places = np.empty(len(self._plan.order), np.int64)
        places[self._plan.order] = np.arange(len(places))
        return places

    def pieces(self, limit: float) -> list[Piece]:
        """In run order. Each costs ``limit`` at most, unless it is a single prompt."""
        found: list[Piece] = []
        # Segments to cut, each with those above it, which were cut before; a stack, as chains may be deep.
        stack: list[tuple[list[int], tuple[int, ...]]] = [(self._roots, ())]
        while stack:
            nodes, above = stack.pop()
            gathered: list[int] = []
            cost = 0.0
            for at, node in enumerate(nodes):
                own = self.total(node)
                if gathered and cost + own > limit:
                    found.append(self._piece(gathered, cost, above))
                    gathered, cost = [], 0.0
                if node < 0 and own > limit:
                    # What comes after it waits until it has been cut.
                    stack.append((nodes[at + 1 :], above))
                    stack.append((self._children[~node], (*above, ~node)))
                    break
                gathered.append(node)
                cost += own
            if gathered:
                found.append(self._piece(gathered, cost, above))
        return found

    def _piece(self, nodes: Sequence[int], cost: float, above: tuple[int, ...]) -> Piece:
        return Piece([prompt for node in nodes for prompt in self.prompts(node)], cost, above)


class _Shares:
    """Gives each process pieces. The pieces of a group, prompts that share something, go to one process if they can."""

    def __init__(self, pieces: list[Piece], segment_costs: Sequence[float], processes: int) -> None:
        self._pieces = pieces
        self._segment_costs = segment_costs
        self._processes = processes
        groups: list[list[int]] = []
        before = None
        for number, piece in enumerate(pieces):
            group = piece.above[0] if piece.above else None
            if group is None or group != before:
                groups.append([])
            groups[-1].append(number)
            before = group
        costed = [(self._cost(group, set()), group) for group in groups]
        self._groups = sorted(costed, key=lambda each: -each[0])  # the largest first

    def split(self) -> Split:
        """In the shortest time in which they all fit."""
        low = sum(cost for cost, _ in self._groups) / self._processes
        found = self._within(float("inf"))
        assert found is not None
        high = found.longest
        while high > low * _EXACT:
            middle = (low + high) / 2
            shorter = self._within(middle)
            if shorter is None:
                low = middle
            else:
                found, high = shorter, min(middle, shorter.longest)
        for share in found.shares:
            share.sort()
        return found

    def _within(self, time: float) -> Split | None:
        """A split in which each process takes so long at most. Groups that do not fit anywhere are parted."""
        split = Split(self._pieces, [[] for _ in range(self._processes)], [0.0] * self._processes, self._segment_costs)
        parted: list[list[int]] = []
        least = [(0.0, process) for process in range(self._processes)]
        for cost, group in self._groups:
            have, process = least[0]
            if have + cost > time:
                parted.append(group)
                continue
            heapq.heapreplace(least, (have + cost, process))
            split.costs[process] = have + cost
            split.shares[process] += group
        for group in parted:
            process, computed = self._freest(split), set[int]()
            for number in group:
                more = self._cost([number], computed)
                if split.costs[process] + more > time:
                    process, computed = self._freest(split), set[int]()
                    more = self._cost([number], computed)
                    if split.costs[process] + more > time:
                        return None
                split.costs[process] += more
                split.shares[process].append(number)
                computed.update(self._pieces[number].above)
        return split

    def _freest(self, split: Split) -> int:
        return min(range(self._processes), key=split.costs.__getitem__)

    def _cost(self, numbers: Sequence[int], computed: set[int]) -> float:
        """The cost of pieces of a group in one process, which has ``computed`` some segments."""
        above = {segment for number in numbers for segment in self._pieces[number].above} - computed
        return sum(self._pieces[number].own for number in numbers) + sum(self._segment_costs[each] for each in above)
