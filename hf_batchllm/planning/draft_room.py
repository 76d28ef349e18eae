"""How many rows each request has in steps with drafts, where each guessed token is a row of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .requests_and_prefixes import Request

_numbers = itertools.count()


@dataclass(frozen=True, eq=False, slots=True)
class DraftRoom:
    """Kept for many steps on end, so that lists of what the rows read are made once for all of them.

    The rows of a request are neighbours. Those behind its guess are idle in a step, and so are all of a request that
    has ended. A room ends where a request has no pages for all of its rows any more, and with any other step.
    """

    place: dict[Request, int]  # each request's place in the arrays
    rows: np.ndarray  # [requests]  at least one
    begin: np.ndarray  # [requests]  the first row of each
    ends: np.ndarray  # [requests]  how many positions may be read of each
    until: list[int]  # [requests]  tokens that each may have
    total: int  # rows of all requests
    size: int  # that a graph for them is to have, at least as many
    number: int = field(default_factory=_numbers.__next__)  # tells it from others, in each process that hears of it

    @staticmethod
    def of(requests: Sequence[Request], rows: np.ndarray, ends: np.ndarray, size: int) -> DraftRoom:
        until = np.cumsum(rows)
        place = {request: number for number, request in enumerate(requests)}
        at_their_limit = ends >= np.array([request.max_length for request in requests], dtype=np.int64)
        last = np.where(at_their_limit, ends, ends - rows + 1).tolist()
        return DraftRoom(place, rows, until - rows, ends, last, int(until[-1]), size)

    def holds(self, requests: Sequence[Request]) -> bool:
        """Whether there is a place for each of them."""
        place, until = self.place, self.until
        return all(request in place and request.length <= until[place[request]] for request in requests)

    def most(self, request: Request) -> int:
        """How many tokens of it may be guessed."""
        place = self.place[request]
        return max(0, min(int(self.rows[place]) - 1, int(self.ends[place]) - request.length))
