"""Drafts as decode rows: each guessed token is a row beside the one that it follows, at the next position.

A row's token is drawn as if all guesses before it were right. It counts if they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from ..planning.draft_room import DraftRoom
from ..planning.step import Step

_NONE = -1  # in the place of a row, or of a token that was drawn
_NO_GUESS = -2


@dataclass(frozen=True)
class DraftRows:
    """Rows of a step with drafts: those of a request are neighbours, and requests stand in the order of the plan."""

    counts: np.ndarray  # [requests]  rows of each
    nth: np.ndarray  # [rows]  which of its request's rows
    ids: np.ndarray  # [rows]
    row: np.ndarray  # [requests, most]  of each request, its rows; -1 for none
    guess: np.ndarray  # [requests, most - 1]
    room: DraftRoom | None  # where rows have places, with idle ones between them
    which: np.ndarray  # [requests]  the place of each in the room

    @staticmethod
    def of(step: Step) -> DraftRows:
        guesses = {chunk.unit: chunk.draft for chunk in step.drafts}
        tokens = [(request.generated[-1], *guesses.get(request, ())) for request in step.rows]
        counts = np.array([len(each) for each in tokens], dtype=np.int64)
        ids = np.fromiter(chain.from_iterable(tokens), np.int64, int(counts.sum()))
        places = np.arange(counts.max())
        there = places < counts[:, None]  # [requests, most]
        row = np.full(there.shape, _NONE, dtype=np.int64)
        row[there] = np.arange(len(ids))
        guess = np.where(there, ids[row], _NO_GUESS)[:, 1:]
        nth, room = np.broadcast_to(places, there.shape)[there], step.room
        of_room = range(len(counts)) if room is None else [room.place[request] for request in step.rows]
        return DraftRows(counts, nth, ids, row, guess, room, np.array(of_room, dtype=np.int64))

    @property
    def total(self) -> int:
        """Rows, with idle ones."""
        return len(self.ids) if self.room is None else self.room.total

    @cached_property
    def places(self) -> np.ndarray | slice:  # [rows]
        """Where each row stands among all of them."""
        if self.room is None:
            return slice(len(self.ids))
        places: np.ndarray = np.repeat(self.room.begin[self.which], self.counts) + self.nth
        return places

    def idle(self) -> tuple[np.ndarray, np.ndarray]:  # both [idle rows]
        """The places of idle rows behind a request's guess, and its last row for each of them."""
        if self.room is None:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        spare = self.room.rows[self.which] - self.counts
        before = np.cumsum(spare) - spare
        first = self.room.begin[self.which] + self.counts
        last = np.cumsum(self.counts) - 1
        return np.repeat(first - before, spare) + np.arange(int(spare.sum())), np.repeat(last, spare)

    def of_each_row(self, values: np.ndarray) -> np.ndarray:
        """``values`` [requests]: as many times as the request has rows."""
        return np.repeat(values, self.counts)

    def that_count(self, drawn: np.ndarray) -> np.ndarray:  # [requests, most]
        """``drawn`` [rows]: the token of each row. Of each request those up to its first wrong guess; -1 for none."""
        tokens: np.ndarray = np.where(self.row >= 0, drawn[self.row], _NONE)
        right = np.cumprod(tokens[:, :-1] == self.guess, axis=1).astype(bool)
        tokens[:, 1:][~right] = _NONE
        return tokens
