"""Looking up the log-probabilities of given tokens: which logits are needed, where, and what was found.

A look-up is a pair of a position and the token to find there. Each position's logits are computed once, however many
items need them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from ...inputs.prompts import Prompt
from ...planning.requests_and_prefixes import Request, Unit
from ...planning.step import Chunk
from ...results.scores import Score
from ...results.sharing_plan import SharingPlan
from .score_inputs import ScoreItem

U = TypeVar("U", bound=Hashable)  # a unit, or its number


class Lookups:
    """The look-ups of a call and their results. ``readers``: of each sequence to run, the items that are read from it.

    *Targets* are the tokens of all items that are scored, one item after the other.
    """

    def __init__(self, items: Sequence[ScoreItem], readers: Sequence[Sequence[int]]) -> None:
        self._items = items
        self._readers = readers
        counts = np.array([len(item.ids) - item.first for item in items], np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(counts)])
        nothing = [np.zeros(0, np.int32)]
        self._targets = np.concatenate([item.ids[item.first :] for item in items] or nothing).astype(np.int64)
        self._logprobs = np.full(len(self._targets), np.nan, np.float32)
        self._greedy = np.zeros(len(self._targets), bool)
        # Of all look-ups, unit by unit, the positions (in order) and the places among the targets.
        self._positions = self._places = np.zeros(0, np.int64)
        self._range_of: dict[Unit, tuple[int, int]] = {}  # which of these are a unit's
        self._asked_end: dict[Unit, int] = {}  # the logits at all positions of a unit before have been asked for

    def reach(self, prompts: Sequence[Prompt]) -> Sequence[int]:
        """How many tokens of each prompt may come from kept prefixes: these give no logits."""
        return [min(self._items[number].first - 1 for number in numbers) for numbers in self._readers]

    def start(self, requests: Sequence[Request]) -> None:
        """Find the look-ups of each unit. ``requests`` are attached to prefixes; their ``index`` is the sequence's."""
        chains = (
            (request.index, [*request.ancestors(), (request, request.prompt_tokens)][::-1]) for request in requests
        )
        units, owners, self._positions, self._places = self._spread(
            (place, [(unit, unit.start, cut) for unit, cut in chain]) for place, chain in chains
        )
        edges = np.searchsorted(owners, np.arange(len(units) + 1)).tolist()
        self._range_of = {unit: (edges[number], edges[number + 1]) for unit, number in units.items()}

    def most_tokens(self, budget: int, rows: int, plan: SharingPlan | None) -> int:
        """How many tokens, of the ``budget``, a step may have without asking for more than ``rows`` rows of logits.

        ``plan``: given if all prompts run from their beginning in its order.
        """
        if budget <= rows or plan is None or len(plan.order) != len(self._readers):
            return max(1, min(budget, rows))
        places = self._run_places(plan)

        def most(tokens: int) -> int:
            return int((np.searchsorted(places, places + tokens) - np.arange(len(places))).max(initial=0))

        if most(budget) <= rows:
            return budget
        return bisect_right(range(budget), rows, lo=max(rows, 1), key=most) - 1

    def _run_places(self, plan: SharingPlan) -> np.ndarray:
        """The numbers of the tokens with look-ups, counting all tokens in the order in which they run."""
        ends = [segment.end for segment in plan.segments]
        begins: dict[int, int] = {}  # unit -> the number of its token at position 0; prompts are keyed by -1 - number
        chains: list[tuple[int, list[tuple[int, int, int]]]] = []
        begin = 0
        for place in plan.order.tolist():
            above = int(plan.parents[place])
            length, start = int(plan.lengths[place]), ends[above] if above >= 0 else 0
            chain = [(-1 - place, start, length)]
            while above >= 0:
                segment = plan.segments[above]
                chain.append((above, segment.start, segment.end))
                above = segment.parent
            for unit, start, cut in reversed(chain):
                if unit not in begins:
                    begins[unit] = begin - start
                    begin += cut - start
            chains.append((place, chain))
        units, owners, positions, _ = self._spread(chains)
        return np.unique(np.array([begins[unit] for unit in units], np.int64)[owners] + positions)

    def _spread(
        self, chains: Iterable[tuple[int, Sequence[tuple[U, int, int]]]]
    ) -> tuple[dict[U, int], np.ndarray, np.ndarray, np.ndarray]:
        """The look-ups unit by unit: the units' numbers; of each look-up the unit, position and place in the targets.

        ``chains``: a prompt, and its units as (unit, start, end of what is read of it), the prompt's own unit first.
        """
        units: dict[U, int] = {}
        parts: list[tuple[int, int, int, int]] = []  # (unit, begin, end, the first look-up's target)
        for prompt, chain in chains:
            for number in self._readers[prompt]:
                item = self._items[number]
                first, end = item.first - 1, len(item.ids) - 1
                target = int(self._offsets[number]) - first
                for unit, start, cut in chain:
                    begin, stop = max(start, first), min(cut, end)
                    if begin < stop:
                        parts.append((units.setdefault(unit, len(units)), begin, stop, target + begin))
                    if start <= first:
                        break
        which, begins, ends, targets = np.array(parts, np.int64).reshape(-1, 4).T
        counts = ends - begins
        steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        owners, positions = np.repeat(which, counts), np.repeat(begins, counts) + steps
        order = np.lexsort((positions, owners))
        return units, owners[order], positions[order], (np.repeat(targets, counts) + steps)[order]

    def wanted(self, chunk: Chunk) -> list[Chunk]:
        """The parts of a chunk whose logits to ask for. A request's last token gives logits without being asked."""
        unit, end = chunk.unit, chunk.end
        begin = max(chunk.begin, self._asked_end.get(unit, 0))
        self._asked_end[unit] = max(begin, end)
        if isinstance(unit, Request):
            end = min(end, unit.length - 1)
        positions = np.unique(self._positions[self._lookups(unit, begin, end)])
        if not len(positions):
            return []
        stretches = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
        return [Chunk(unit, int(stretch[0]), int(stretch[-1]) + 1) for stretch in stretches]

    def ask_again(self, chunks: Sequence[Chunk]) -> None:
        """These chunks were to run, and did not: ``wanted`` forgets that it was asked about them."""
        for chunk in chunks:
            self._asked_end[chunk.unit] = min(self._asked_end.get(chunk.unit, 0), chunk.begin)

    def pairs(self, sampling: Sequence[Request], asked: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
        """For each look-up in a step's logits, its row and its place among the targets, in the order of the rows.

        The step's logits are those of ``sampling``, a row each, then those of ``asked``.
        """
        rows: list[np.ndarray] = [np.zeros(0, np.int64)]
        places: list[np.ndarray] = [np.zeros(0, np.int64)]
        row = 0
        for part in [*(Chunk(each, each.length - 1, each.length) for each in sampling), *asked]:
            here = self._lookups(part.unit, part.begin, part.end)
            rows.append(self._positions[here] - part.begin + row)
            places.append(self._places[here])
            row += part.end - part.begin
        return np.concatenate(rows), np.concatenate(places)

    def targets(self, places: np.ndarray) -> np.ndarray:
        """The tokens at ``places``."""
        tokens: np.ndarray = self._targets[places]
        return tokens

    def put(self, places: np.ndarray, logprobs: np.ndarray, greedy: np.ndarray) -> None:
        """Store what was found for the targets at ``places``."""
        self._logprobs[places], self._greedy[places] = logprobs, greedy

    def scores(self, request: Request, decode: Callable[[list[int]], str | None]) -> Iterator[Score]:
        """The scores of all items that are read from ``request``, which has ended."""
        for number in self._readers[request.index]:
            item = self._items[number]
            mine = slice(self._offsets[number], self._offsets[number + 1])
            ids = self._targets[mine].tolist()
            text = decode(ids) if item.text is None else item.text
            logprobs, greedy = self._logprobs[mine].tolist(), bool(self._greedy[mine].all())
            yield Score(item.index, item.choice, text, ids, logprobs, greedy)

    def _lookups(self, unit: Unit, begin: int, end: int) -> slice:
        """The look-ups of a unit at positions ``[begin, end)``."""
        first, last = self._range_of.get(unit, (0, 0))
        low, high = np.searchsorted(self._positions[first:last], (begin, end)).tolist()
        return slice(first + low, first + max(low, high))
