"""The room of steps with drafts on a GPU: kept as long as it serves, as lists for another take the host long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...planning.draft_room import DraftRoom
from ...planning.requests_and_prefixes import Request
from ..device_loop.graph_sizes import DRAFT_SIZES, draft_size_of

_TOKENS_AHEAD = 64  # of each answer, for which a room is made
_LISTS = 0.15  # of a step's tokens are worth new lists
_UNSUITED = 1  # times in a row that another size would do, before there is another room

Guesses = Mapping[Request, Sequence[int]]


class KeptRoom:
    """most: how many tokens of a request may be guessed. lengthen: as ``Drafts`` has it."""

    def __init__(self, most: Callable[[Request], int], lengthen: Callable[[Request, int], int]) -> None:
        self._most = most
        self._lengthen = lengthen
        self._room: DraftRoom | None = None
        self._unsuited = 0
        self.sizes: Sequence[int] = DRAFT_SIZES  # that rooms may have, smallest first

    def end(self) -> None:
        self._room = None

    def of(self, requests: Sequence[Request]) -> DraftRoom | None:
        """Where these can go on with a guess of any length that has been there before."""
        room = self._room
        return room if room is not None and room.holds(requests) else None

    def size(self, tokens: int) -> int:
        """Rows of the graph that such a step runs in."""
        return next((size for size in self.sizes if size >= tokens), draft_size_of(tokens))

    @staticmethod
    def fits(room: DraftRoom, rows: int, guesses: Guesses, rate: float) -> bool:
        """Whether few guesses are cut off. ``rate``: how many are right."""
        guessed = min(sum(map(len, guesses.values())), room.size - rows)
        fitting = sum(min(len(guess), room.most(request)) for request, guess in guesses.items())
        return rate * (guessed - fitting) <= _LISTS * (rows + rate * fitting)

    def next(self, requests: Sequence[Request], guesses: Guesses, rate: float, most_tokens: int) -> DraftRoom:
        """For these guesses. ``most_tokens``: of a step."""
        room, rows = self.of(requests), len(requests)
        if room is not None and self.fits(room, rows, guesses, rate):
            suits = self.size(rows + sum(map(len, guesses.values()))) == room.size
            self._unsuited = 0 if suits else self._unsuited + 1
            if self._unsuited <= _UNSUITED:
                return room
        self._unsuited = 0
        self._room = self._new(requests, guesses, most_tokens)
        return self._room

    def _new(self, requests: Sequence[Request], guesses: Guesses, most_tokens: int) -> DraftRoom:
        rows = np.array([1 + len(guesses.get(request, ())) for request in requests], dtype=np.int64)
        most = np.array([1 + max(self._most(request), 0) for request in requests], dtype=np.int64)
        size = self.size(int(rows.sum()))
        free = min(size, max(most_tokens, int(rows.sum())))  # those that the graph has beside cost nothing
        while len(shorter := np.flatnonzero(rows < most)[: free - int(rows.sum())]):
            rows[shorter] += 1
        ends = [
            max(self._lengthen(request, min(request.length + _TOKENS_AHEAD, request.max_length)), request.length)
            for request in requests
        ]
        return DraftRoom.of(requests, rows, np.array(ends, dtype=np.int64), size)
