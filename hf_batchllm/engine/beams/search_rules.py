"""The rules of a beam search as in transformers: which beams go on, which are answers, and when the search is over.

The rules take only scores, in float32 on the host: no model, no tokens. Many searches take a step together, each at its
own length. The order among equal scores is that of ``torch.topk``, called as transformers calls it. Equal scores are
common: wherever fewer candidates than beams can go on, the rest all have the score ``NEVER``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

NEVER = -1.0e9  # transformers' score of a beam or an answer that does not exist
_NO_TOKEN = -1
_FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever PyTorch's defaults are


@dataclass(frozen=True)
class SearchRules:
    """The options that some searches have in common."""

    width: int  # num_beams
    candidates: int  # in each step; more than beams, as some of them end
    early_stopping: bool | str
    length_penalty: float

    @staticmethod
    def of(width: int, stop_tokens: int, early_stopping: bool | str, length_penalty: float) -> SearchRules:
        return SearchRules(width, max(2, 1 + stop_tokens) * width, early_stopping, length_penalty)


@dataclass(frozen=True)
class Choice:
    """The outcome of a step, for each of the searches that took it."""

    running: list[list[int]]  # [searches, width]  the candidates that go on, the best first
    answers: list[list[int]]  # [searches, width]  below `width` the number of an answer so far, else width + candidate
    over: list[bool]  # [searches]


class FinishedBeam(NamedTuple):
    """An answer so far; empty while there are too few."""

    made: int = 0  # tokens of the beam that it was
    beam: int = 0  # its number among the beams of then
    token: int | None = None  # one more, with which it ended
    stopped: bool = False


class FinishedBeams:
    """The best finished beams of several searches, as arrays: in most steps each has others, if only among equals.

    The tokens of those that stay to the end, which mostly they do not, are put together then.
    """

    def __init__(self, searches: int, width: int) -> None:
        # [searches, width, (made, beam, token, stopped)]  the best first
        self._found = np.zeros((searches, width, 4), dtype=np.int64)
        self._found[:, :, 2] = _NO_TOKEN

    def take(
        self,
        which: Sequence[int],
        made: Sequence[int],  # [searches]  new tokens of each beam
        answers: np.ndarray,  # [searches, width]  as in ``Choice``
        beams: np.ndarray,  # [searches, candidates]  the beam that each candidate goes on from
        tokens: np.ndarray | None = None,  # [searches, candidates]  None: the beams themselves are the candidates
        stopped: np.ndarray | None = None,  # [searches, candidates] bool  whether each ends with its token
    ) -> None:
        new = np.empty((*beams.shape, 4), dtype=np.int64)
        new[:, :, 0] = np.array(made)[:, None]
        new[:, :, 1] = beams
        new[:, :, 2] = _NO_TOKEN if tokens is None else tokens
        new[:, :, 3] = False if stopped is None else stopped
        every = np.concatenate([self._found[which], new], axis=1)
        self._found[which] = np.take_along_axis(every, answers[:, :, None], axis=1)

    def of(self, search: int) -> list[FinishedBeam]:  # [width]
        return [
            FinishedBeam(made, beam, None if token == _NO_TOKEN else token, bool(stopped))
            for made, beam, token, stopped in self._found[search].tolist()
        ]


class Searches:
    """The state of several searches. ``longest``: how many new tokens each may have by its options."""

    def __init__(self, rules: SearchRules, longest: Sequence[int]) -> None:
        count, width = len(longest), rules.width
        self.rules = rules
        with torch.inference_mode(False):  # later steps may run outside it
            self.running = torch.full((count, width), NEVER, **_FLOATS)  # scores of the beams
            self.running[:, 0] = 0.0  # at first all beams are the same, so only one counts
            self.scores = torch.full((count, width), NEVER, **_FLOATS)  # of the answers
            self.finished = torch.zeros(count, width, dtype=torch.bool, device="cpu")  # whether the answer exists
            self._may_improve = torch.ones(count, 1, dtype=torch.bool, device="cpu")
        self._longest = list(longest)
        self.found = FinishedBeams(count, width)

    def step(
        self,
        which: Sequence[int],
        made: Sequence[int],  # [searches]  new tokens of each beam before this step
        scores: torch.Tensor,  # [searches, candidates]  sums of log-probabilities, in the order of picking
        ends: torch.Tensor,  # [searches, candidates] bool
    ) -> Choice:
        rules, index = self.rules, torch.tensor(which, dtype=torch.long, device="cpu")
        # Candidates that end go on only where there are not enough others.
        going_on = scores + ends.to(torch.float32) * NEVER
        chosen = going_on.topk(rules.width).indices
        running = going_on.gather(1, chosen)
        # Only the best `width` candidates may become answers. The others are there to replace them as beams.
        just_ended = ends.clone()
        just_ended[:, rules.width :] = False
        may_improve, finished = self._may_improve[index], self.finished[index]
        penalty = self._by_length([tokens + 1 for tokens in made])
        new = scores / penalty
        full = finished.all(dim=-1, keepdim=True) & (rules.early_stopping is True)
        for excluded in (full, ~may_improve, ~just_ended):
            new += excluded.to(torch.float32) * NEVER
        merged = torch.cat([self.scores[index], new], dim=1)
        answers = merged.topk(rules.width).indices
        answer_scores = merged.gather(1, answers)
        finished = torch.cat([finished, just_ended], dim=1).gather(1, answers)
        # Whether the best beam could still become better than the worst answer.
        if rules.early_stopping == "never" and rules.length_penalty > 0.0:
            penalty = self._by_length([self._longest[search] for search in which])
        worst = torch.where(finished, answer_scores.amin(dim=1, keepdim=True), NEVER)
        may_improve = may_improve & (running[:, :1] / penalty > worst).any(dim=-1, keepdim=True)
        over = ~may_improve[:, 0] | ends.all(dim=1)
        if rules.early_stopping is True:
            over |= finished.all(dim=1)
        self.running[index], self.scores[index], self.finished[index] = running, answer_scores, finished
        self._may_improve[index] = may_improve
        return Choice(chosen.tolist(), answers.tolist(), over.tolist())

    def _by_length(self, lengths: Sequence[int]) -> torch.Tensor:  # [searches, 1]
        return torch.tensor([float(length**self.rules.length_penalty) for length in lengths], **_FLOATS)[:, None]
