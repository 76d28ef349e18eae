"""The rules of a beam search as transformers has them: who goes on, who has finished, when it is over.

Numbers alone, in float32 on the host: no model, no tokens. Many searches are looked at together, each wherever it is.
Order among equals is left to ``torch.topk``, asked as transformers asks it: equals there are, wherever less than a
whole set of beams has anything to go on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NEVER = -1.0e9  # transformers' score of what is not there


@dataclass(frozen=True)
class SearchRules:
    """What the searches of some prompts have in common."""

    width: int  # num_beams
    candidates: int  # looked at in each step: some of them end
    early_stopping: bool | str
    length_penalty: float

    @staticmethod
    def of(width: int, stop_tokens: int, early_stopping: bool | str, length_penalty: float) -> SearchRules:
        return SearchRules(width, max(2, 1 + stop_tokens) * width, early_stopping, length_penalty)


@dataclass(frozen=True)
class Choice:
    """What a step comes to, for each of the searches that took it."""

    running: list[list[int]]  # [searches, width]  which candidates go on, the best first
    kept: list[list[int]]  # [searches, width]  answers: below ``width`` those there were, then candidates
    over: list[bool]  # [searches]


class Searches:
    """``longest``: new tokens that each search may come to by its options."""

    def __init__(self, rules: SearchRules, longest: Sequence[int]) -> None:
        count, width = len(longest), rules.width
        self.rules = rules
        self.running = torch.full((count, width), NEVER)  # scores of beams that go on
        self.running[:, 0] = 0.0  # at first they are all the same
        self.scores = torch.full((count, width), NEVER)  # of answers
        self.finished = torch.zeros(count, width, dtype=torch.bool)  # whether there is an answer
        self._may_improve = torch.ones(count, 1, dtype=torch.bool)
        self._longest = list(longest)

    def step(
        self,
        which: Sequence[int],
        made: Sequence[int],  # [searches]  new tokens that each had before this step
        scores: torch.Tensor,  # [searches, candidates]  sums of log-probabilities, as they were picked
        ends: torch.Tensor,  # [searches, candidates] bool
    ) -> Choice:
        rules, index = self.rules, torch.tensor(which, dtype=torch.long)
        # Those that end are passed over, unless there is nobody else.
        going_on = scores + ends.to(torch.float32) * NEVER
        chosen = going_on.topk(rules.width).indices
        running = going_on.gather(1, chosen)
        # A candidate counts as an answer if it is among the best so many; the others are there to go on with.
        just_ended = ends.clone()
        just_ended[:, rules.width :] = False
        may_improve, finished = self._may_improve[index], self.finished[index]
        penalty = self._by_length([tokens + 1 for tokens in made])
        new = scores / penalty
        full = finished.all(dim=-1, keepdim=True) & (rules.early_stopping is True)
        for excluded in (full, ~may_improve, ~just_ended):
            new += excluded.to(torch.float32) * NEVER
        merged = torch.cat([self.scores[index], new], dim=1)
        kept = merged.topk(rules.width).indices
        answers = merged.gather(1, kept)
        finished = torch.cat([finished, just_ended], dim=1).gather(1, kept)
        # Whether the best of those going on could still become better than the worst answer.
        if rules.early_stopping == "never" and rules.length_penalty > 0.0:
            penalty = self._by_length([self._longest[search] for search in which])
        worst = torch.where(finished, answers.amin(dim=1, keepdim=True), NEVER)
        may_improve = may_improve & (running[:, :1] / penalty > worst).any(dim=-1, keepdim=True)
        over = ~may_improve[:, 0] | ends.all(dim=1)
        if rules.early_stopping is True:
            over |= finished.all(dim=1)
        self.running[index], self.scores[index], self.finished[index] = running, answers, finished
        self._may_improve[index] = may_improve
        return Choice(chosen.tolist(), kept.tolist(), over.tolist())

    def _by_length(self, lengths: Sequence[int]) -> torch.Tensor:  # [searches, 1]
        return torch.tensor([float(length**self.rules.length_penalty) for length in lengths])[:, None]
