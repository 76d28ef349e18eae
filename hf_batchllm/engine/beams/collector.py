"""What comes of the steps of a beam search: the next beams of each prompt, and in the end its answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ...model.transfers import current_device
from ...planning.requests_and_prefixes import FinishReason, Request
from ...planning.step import Step
from ...sampling.stopping import Endings
from ..loop import Collector, InFlightStep
from .candidates import Candidates
from .group import BeamGroup
from .launcher import BeamLauncher


class BeamEndings(Endings):
    """Which candidates of a beam search end with their token: the rules of ``Endings``, for all at once."""

    def of_candidates(
        self, groups: Sequence[BeamGroup], parents: np.ndarray, tokens: np.ndarray
    ) -> np.ndarray:  # [groups, candidates] bool
        """Which candidates end with the token that each adds to its parent, limits of length not counted."""
        rules = [self._rules[group.root.index] for group in groups]
        if any(each is not rules[0] for each in rules) or rules[0].looks_back:
            ended = np.stack([self._of_group(*each) for each in zip(groups, parents, tokens, strict=True)])
            return ended
        return _among(tokens, rules[0].stop_tokens)

    def _of_group(self, group: BeamGroup, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:  # [candidates] bool
        rules = self._rules[group.root.index]
        stops = _among(tokens, rules.stop_tokens)
        if not rules.looks_back:
            return stops
        prompt = self._prompt(group.root)
        new = np.array([[*group.tokens(parent), token] for parent, token in zip(parents, tokens, strict=True)])
        ids = np.concatenate([np.broadcast_to(prompt, (len(tokens), len(prompt))), new], axis=1).astype(np.int64)
        for strings in rules.strings:
            stops |= self._strings[strings].complete(ids)
        own = self._criteria(group.root)
        if own:
            with torch.no_grad(), current_device(self._device), torch.cuda.stream(self._stream):
                scores = None if self._scores is None else self._scores(group.root, group.made + 1)
                # Copied within the stream: another one would not wait for the criteria.
                ends = self._asked(own, group.root, torch.from_numpy(ids).to(self._device), scores).cpu().numpy()
            stops |= np.broadcast_to(ends, stops.shape)
        return stops


class BeamCollector(Collector):
    """Chooses the next beams among the candidates that the launcher finds."""

    endings: BeamEndings

    def __init__(self, launcher: BeamLauncher, *given: Any) -> None:
        self.launcher = launcher
        self.groups = launcher.groups
        super().__init__(_answers(self.groups.values()), *given)
        self._beam_tokens = 0  # that were run
        self._decoded = 0  # of these, those run for the first time, up to each group's last choice

    @property
    def decoded(self) -> int:
        return self._decoded + sum(len(group.logits) for group in self.groups.values() if group.beams)

    @property
    def recomputed(self) -> int:
        return self._beam_tokens - self.decoded

    def launched(self, step: Step, counts: Sequence[int]) -> None:
        self._beam_tokens += step.tokens - step.prompt_tokens

    def collect(self, running: InFlightStep, found: list[Candidates]) -> tuple[list[Request], int]:
        """Choose each group's next beams and its answers so far. All answers of a prompt end together."""
        self.timekeeper.switch("tokens")
        with self.launcher.surroundings(), self.launcher.users_turn():  # criteria may run it
            over = [group for each in found for group in self.choose(each)]
        return _answers(over), len(_answers(group for each in found for group in each.groups))

    def choose(self, candidates: Candidates) -> list[BeamGroup]:
        """Choose each group's next beams and its answers so far. Returns the groups whose search is over."""
        groups, parents, tokens = candidates.groups, candidates.parents.numpy(), candidates.tokens.numpy()
        searches, places = groups[0].searches, [group.place for group in groups]
        made = [group.made for group in groups]
        stops = self.endings.of_candidates(groups, parents, tokens)
        full = np.array([group.made + 1 >= group.root.max_new_tokens for group in groups])
        ends = torch.from_numpy(stops | full[:, None])
        choice = searches.step(places, made, candidates.scores, ends)
        searches.found.take(places, made, np.array(choice.answers), parents, tokens, stops)
        finished = []
        running = np.array(choice.running)
        of_each = zip(
            groups,
            choice.over,
            np.take_along_axis(parents, running, axis=1).tolist(),
            np.take_along_axis(tokens, running, axis=1).tolist(),
            strict=True,
        )
        for group, over, next_parents, next_tokens in of_each:
            self._decoded += len(group.beams)
            if over:
                self._finish(group, FinishReason.LENGTH)
                finished.append(group)
            else:
                group.fork(next_parents, next_tokens)
        return finished

    def out_of_time(self, late: list[Request]) -> list[Request]:
        """The present beams compete with the finished ones for the answers. A prompt that had not begun has none."""
        groups = [self.groups[root] for root in late]
        for group in groups:
            if group.made:
                self._decoded += len(group.logits)
                searches, place = group.searches, group.place
                running = searches.running[[place]]
                choice = searches.step([place], [group.made - 1], running, torch.ones_like(running, dtype=torch.bool))
                searches.found.take([place], [group.made], np.array(choice.answers), np.arange(group.width)[None])
            self._finish(group, FinishReason.TIME)
        return _answers(groups)

    def _finish(self, group: BeamGroup, otherwise: FinishReason) -> None:
        """Fill in the group's answers. ``otherwise``: the reason of answers that nothing in their tokens ended."""
        scores = group.searches.scores[group.place].tolist()
        finished = group.searches.found.of(group.place)
        for answer, best, score in zip(group.answers, finished, scores, strict=False):
            answer.generated, answer.parents = group.answer(best)
            answer.searched = group.made + (otherwise is not FinishReason.TIME)  # and the token just chosen
            answer.score = None if otherwise is FinishReason.TIME and not group.made else score
            answer.end(FinishReason.STOP if best.stopped else otherwise)
        group.root.end(otherwise)
        self.scheduler.finish(group.root)


def _answers(groups: Iterable[BeamGroup]) -> list[Request]:
    return [answer for group in groups for answer in group.answers]


def _among(tokens: np.ndarray, some: Collection[int]) -> np.ndarray:
    return np.isin(tokens, list(some)) if some else np.zeros(tokens.shape, dtype=bool)
