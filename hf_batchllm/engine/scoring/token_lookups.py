"""Tokens that are looked up in the logits of prompts: which ones, at which positions of which units, and what is found.

Each position is looked at once, however many items have it in common.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from ...inputs.prompts import Prompt
from ...planning.units import Chunk, Request, Unit
from ...results.scores import Score
from ...results.sharing_plan import SharingPlan
from .score_inputs import ScoreItem

U = TypeVar("U", bound=Hashable)


class Lookups:
    """Which tokens are looked up at which positions of which units, and what was found."""

    def __init__(self, items: Sequence[ScoreItem], readers: Sequence[Sequence[int]]) -> None:
        self._items = items
        self._readers = readers
        counts = np.array([len(item.ids) - item.first for item in items], np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(counts)])
        nothing = [np.zeros(0, np.int32)]
        self._targets = np.concatenate([item.ids[item.first :] for item in items] or nothing).astype(np.int64)
        self._logprobs = np.full(len(self._targets), np.nan, np.float32)
        self._greedy = np.zeros(len(self._targets), bool)
        self._of: dict[Unit, tuple[int, int]] = {}  # where its lookups stand in the following two
        self._positions = self._places = np.zeros(0, np.int64)  # a unit's in order; the places are those of targets
        self._seen: dict[Unit, int] = {}  # logits at all positions before have been asked for

    def reach(self, prompts: Sequence[Prompt]) -> Sequence[int]:
        return [min(self._items[number].first - 1 for number in numbers) for numbers in self._readers]

    def start(self, requests: Sequence[Request]) -> None:
        """The call's requests, attached to their prefixes. Their ``index`` says who reads them."""
        chains = (
            (request.index, [*request.ancestors(), (request, len(request.prompt_ids))][::-1]) for request in requests
        )
        units, owners, self._positions, self._places = self._spread(
            (place, [(unit, unit.start, cut) for unit, cut in chain]) for place, chain in chains
        )
        edges = np.searchsorted(owners, np.arange(len(units) + 1)).tolist()
        self._of = {unit: (edges[number], edges[number + 1]) for unit, number in units.items()}

    def most_tokens(self, budget: int, rows: int, plan: SharingPlan | None) -> int:
        """How many tokens a step may have, of the ``budget``, so that no more than so many rows are asked for.

        ``plan``: in whose order the prompts run, if they do, and from their beginning.
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
        """At which of all tokens that are run, one after the other, something is looked up."""
        ends = [segment.end for segment in plan.segments]
        begins: dict[int, int] = {}  # of each unit; prompts have numbers below 0
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
        """Over units: numbers of these, then of each lookup that number, its position, its place among the targets.

        ``chains``: a prompt, and the units that it is made of, innermost first, with what is read of each.
        """
        units: dict[U, int] = {}
        parts: list[tuple[int, int, int, int]] = []  # of a unit [begin, end), for the targets from there on
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
        """The parts of a chunk whose logits are asked for; a request's last token is sampled anyway."""
        unit, end = chunk.unit, chunk.end
        begin = max(chunk.begin, self._seen.get(unit, 0))
        self._seen[unit] = max(begin, end)
        if isinstance(unit, Request):
            end = min(end, unit.length - 1)
        positions = np.unique(self._positions[self._lookups(unit, begin, end)])
        if not len(positions):
            return []
        stretches = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
        return [Chunk(unit, int(stretch[0]), int(stretch[-1]) + 1) for stretch in stretches]

    def pairs(self, sampling: Sequence[Request], asked: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
        """For each lookup in a step's logits, its row and its place among the targets. Rows come in order."""
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
        return self._targets[places]

    def put(self, places: np.ndarray, logprobs: np.ndarray, greedy: np.ndarray) -> None:
        self._logprobs[places], self._greedy[places] = logprobs, greedy

    def scores(self, request: Request, decode: Callable[[list[int]], str | None]) -> Iterator[Score]:
        """Of the items that are read from a request that has ended."""
        for number in self._readers[request.index]:
            item = self._items[number]
            mine = slice(self._offsets[number], self._offsets[number + 1])
            ids = self._targets[mine].tolist()
            text = decode(ids) if item.text is None else item.text
            logprobs, greedy = self._logprobs[mine].tolist(), bool(self._greedy[mine].all())
            yield Score(item.index, item.choice, text, ids, logprobs, greedy)

    def _lookups(self, unit: Unit, begin: int, end: int) -> slice:
        """Those at positions ``[begin, end)``."""
        first, last = self._of.get(unit, (0, 0))
        low, high = np.searchsorted(self._positions[first:last], (begin, end)).tolist()
        return slice(first + low, first + max(low, high))
