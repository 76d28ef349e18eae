"""What comes of the steps of a beam search: the next beams of each prompt, and in the end its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch

from ...planning.requests_and_prefixes import Branch, FinishReason, Request
from ...planning.step import Step
from ..loop import Flight
from .candidates import Candidates
from .ended_candidates import BeamEndings
from .finished_beams import FinishedBeams
from .group import BeamGroup
from .launcher import BeamLauncher
from .scheduler import BeamScheduler
from .search_rules import Searches


class BeamCollector:
    """A ``Collector`` that chooses the next beams among the candidates that the launcher finds."""

    idle_tokens = 0

    def __init__(self, scheduler: BeamScheduler, launcher: BeamLauncher, endings: BeamEndings) -> None:
        self.scheduler = scheduler
        self.launcher = launcher
        self.endings = endings
        self.groups = launcher.groups
        self.answers: Sequence[Request] = _answers(self.groups.values())
        self._finished: dict[Searches, FinishedBeams] = {}
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
        self.scheduler.on_their_way |= _roots(step)

    def broke_off(self, flight: Flight) -> None:
        """No beam ends unseen."""

    def collect(self, flight: Flight, found: list[Candidates]) -> tuple[list[Request], int]:
        """Choose each group's next beams and its answers so far. All answers of a prompt end together."""
        self.launcher.timekeeper.switch("tokens")
        self.scheduler.on_their_way -= _roots(flight.step)
        with self.launcher.surroundings(), self.launcher.owners_turn():  # criteria may run it
            over = [group for each in found for group in self.choose(each)]
        return _answers(over), len(_answers(group for each in found for group in each.groups))

    def choose(self, candidates: Candidates) -> list[BeamGroup]:
        """Choose each group's next beams and its answers so far. Returns the groups whose search is over."""
        groups, parents, tokens = candidates.groups, candidates.parents.numpy(), candidates.tokens.numpy()
        made = [group.made for group in groups]
        stops = self.endings.of_candidates(groups, parents, tokens)
        full = np.array([group.made + 1 >= group.root.max_new_tokens for group in groups])
        ends = torch.from_numpy(stops | full[:, None])
        choice = candidates.searches.step(candidates.places, made, candidates.scores, ends)
        self._finished_in(candidates.searches).take(
            candidates.places, made, np.array(choice.answers), parents, tokens, stops
        )
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
                searches, place = self.launcher.scores.place(group)
                running = searches.running[[place]]
                choice = searches.step([place], [group.made - 1], running, torch.ones_like(running, dtype=torch.bool))
                self._finished_in(searches).take(
                    [place], [group.made], np.array(choice.answers), np.arange(group.width)[None]
                )
            self._finish(group, FinishReason.TIME)
        return _answers(groups)

    def _finished_in(self, searches: Searches) -> FinishedBeams:
        if searches not in self._finished:
            self._finished[searches] = FinishedBeams(*searches.scores.shape)
        return self._finished[searches]

    def _finish(self, group: BeamGroup, otherwise: FinishReason) -> None:
        """Fill in the group's answers. ``otherwise``: the reason of answers that nothing in their tokens ended."""
        searches, place = self.launcher.scores.place(group)
        scores = searches.scores[place].tolist()
        finished = self._finished_in(searches).of(place)
        for answer, best, score in zip(group.answers, finished, scores, strict=False):
            answer.generated, answer.parents = group.answer(best)
            answer.searched = group.made + (otherwise is not FinishReason.TIME)  # and the token just chosen
            answer.score = None if otherwise is FinishReason.TIME and not group.made else score
            answer.end(FinishReason.STOP if best.stopped else otherwise)
        group.root.end(otherwise)
        self.scheduler.finish(group.root)


def _roots(step: Step) -> set[Request]:
    """Of all groups that have a part in it."""
    units = chain(step.rows, (chunk.unit for chunk in step.chunks))
    return {unit.root for unit in units if isinstance(unit, Branch)}


def _answers(groups: Iterable[BeamGroup]) -> list[Request]:
    return [answer for group in groups for answer in group.answers]
