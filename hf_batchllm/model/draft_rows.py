"""Drafts as decode rows: each guessed token is a row beside the one that it follows, at the next position.

A row's token is drawn as if all guesses before it were right. It counts if they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..planning.requests_and_prefixes import Request
from ..planning.step import Step

_NONE = -1  # in the place of a row, or of a token that was drawn
_NO_GUESS = -2


@dataclass(frozen=True)
class DraftRows:
    """Rows of a step with drafts: those of a request are neighbours, and requests stand in the order of the plan."""

    requests: Sequence[Request]  # [rows]
    nth: np.ndarray  # [rows]  which of its request's rows
    ids: np.ndarray  # [rows]
    row: np.ndarray  # [requests, most]  of each request, its rows; -1 for none
    guess: np.ndarray  # [requests, most - 1]

    @staticmethod
    def of(step: Step) -> DraftRows:
        guesses = {chunk.unit: chunk.draft for chunk in step.drafts}
        most = 1 + max(map(len, guesses.values()))
        row = np.full((len(step.rows), most), _NONE, dtype=np.int64)
        guess = np.full((len(step.rows), most - 1), _NO_GUESS, dtype=np.int64)
        requests: list[Request] = []
        ids: list[int] = []
        for place, request in enumerate(step.rows):
            draft = guesses.get(request, ())
            row[place, : 1 + len(draft)] = np.arange(len(requests), len(requests) + 1 + len(draft))
            guess[place, : len(draft)] = draft
            requests += [request] * (1 + len(draft))
            ids += [request.generated[-1], *draft]
        there = row >= 0
        nth = np.broadcast_to(np.arange(most), row.shape)[there]
        return DraftRows(requests, nth, np.array(ids, dtype=np.int64), row, guess)

    def numbers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # [rows] each
        """Ids, positions and new tokens so far."""
        made = np.array([request.made for request in self.requests], dtype=np.int64) + self.nth
        prompts = np.array([request.prompt_tokens for request in self.requests], dtype=np.int64)
        return self.ids, prompts + made - 1, made

    def that_count(self, drawn: np.ndarray) -> np.ndarray:  # [requests, most]
        """``drawn`` [rows]: the token of each row. Of each request those up to its first wrong guess; -1 for none."""
        tokens: np.ndarray = np.where(self.row >= 0, drawn[self.row], _NONE)
        right = np.cumprod(tokens[:, :-1] == self.guess, axis=1).astype(bool)
        tokens[:, 1:][~right] = _NONE
        return tokens
