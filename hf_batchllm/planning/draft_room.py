"""How many rows each request has in steps with drafts, where each guessed token is a row of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .requests_and_prefixes import Request


@dataclass(frozen=True, eq=False, slots=True)
class DraftRoom:
    """Kept for many steps on end, so that lists of what the rows read are made once for all of them.

    The rows of a request are neighbours. Those behind its guess are idle in a step, and so are all of a request that
    has ended. A room ends where a request reaches the last position that it had pages for, and with any other step.
    """

    place: dict[Request, int]  # each request's place in the arrays
    rows: np.ndarray  # [requests]  at least one
    begin: np.ndarray  # [requests]  the first row of each
    ends: np.ndarray  # [requests]  how many positions may be read of each
    total: int  # rows of all requests
    size: int  # that a graph for them is to have, at least as many

    @staticmethod
    def of(requests: Sequence[Request], rows: np.ndarray, ends: np.ndarray, size: int) -> DraftRoom:
        until = np.cumsum(rows)
        place = {request: number for number, request in enumerate(requests)}
        return DraftRoom(place, rows, until - rows, ends, int(until[-1]), size)

    def holds(self, requests: Sequence[Request]) -> bool:
        """Whether a row of each of them has its place."""
        place, ends = self.place, self.ends.tolist()
        return all(request in place and request.length <= ends[place[request]] for request in requests)

    def most(self, request: Request) -> int:
        """How many tokens of it may be guessed."""
        place = self.place[request]
        return min(int(self.rows[place]) - 1, int(self.ends[place]) - request.length)
