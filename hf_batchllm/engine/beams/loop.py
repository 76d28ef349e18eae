"""The loop of a beam search: next step, build, run; once all beams of a prompt have run, choose its next beams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from ...model.batch import BatchBuilder
from ...planning.requests_and_prefixes import Branch, FinishReason, Request
from ...planning.step import Step
from ..device_errors import name_what_ran
from ..device_loop.steps_as_graphs import StepsAsGraphs
from ..smaller_steps import SmallerSteps
from ..timekeeper import Timekeeper
from .candidates import BeamScores, Candidates
from .ended_candidates import BeamEndings
from .finished_beams import FinishedBeams
from .group import BeamGroup
from .scheduler import BeamScheduler
from .search_rules import Searches


class BeamEngine:
    def __init__(
        self,
        scheduler: BeamScheduler,
        builder: BatchBuilder,
        launcher: StepsAsGraphs,
        groups: Sequence[BeamGroup],
        scores: BeamScores,
        endings: BeamEndings,
        timekeeper: Timekeeper,
        smaller: SmallerSteps,
    ) -> None:
        self.scheduler = scheduler
        self.builder = builder
        self.launcher = launcher
        self.runner = launcher.runner
        self.groups = groups
        self.answers = [answer for group in groups for answer in group.answers]
        self.scores = scores
        self.endings = endings
        self.timekeeper = timekeeper
        self.smaller = smaller
        self._finished: dict[Searches, FinishedBeams] = {}
        self._picking = False
        self.steps = 0
        self.model_tokens = 0
        self.idle_tokens = 0
        self.beam_tokens = 0  # of the model tokens, those of beams
        self._decoded = 0  # of the beams' tokens, those run for the first time, up to each group's last choice
        self._group_of: dict[Request, BeamGroup] = {group.root: group for group in groups}

    @property
    def decoded(self) -> int:
        """How many of the beams' tokens were run for the first time."""
        return self._decoded + sum(len(group.logits) for group in self.groups if group.beams)

    def run(self, watch: Callable[[Step, int], None] | None = None) -> Iterator[Request]:
        """Answers as they are found, all answers of a prompt together.

        ``watch`` is called after every step, with the step and the number of new answer tokens that it gave.
        """
        switch = self.timekeeper.switch
        while True:
            switch("scheduling")
            if late := [] if self.smaller.waiting else self.endings.late():
                finished = [self._group_of[root] for root in late]
                for group in finished:
                    self._out_of_time(group)
            else:
                step = self._next()
                if step is None:
                    return
                try:
                    chosen, candidates = self._step(step)
                except Exception as error:
                    if self.smaller.takes(error, step, partial(self._may_repeat, step)):
                        continue
                    name_what_ran(error, [], step, self.launcher.replays)
                    raise
                self.smaller.ran()
                with self.launcher.surroundings(), self.launcher.owners_turn():  # criteria may run it
                    finished = [group for each in candidates for group in self.choose(each)]
                if watch is not None:
                    switch("outside")
                    watch(step, sum(len(group.answers) for group in chosen))
            for group in finished:
                switch("results")
                yield from group.answers

    def _next(self) -> Step | None:
        if self.smaller.waiting and (part := self.smaller.next(self._put_back)) is not None:
            return part
        step = self.scheduler.next()
        return self._next() if step is not None and self.smaller.cut(step) else step

    def _may_repeat(self, step: Step) -> bool:
        """After a step that failed."""
        groups = {self._group_of[unit.root]: None for unit in step.sampling() if isinstance(unit, Branch)}
        return not self._picking or self.scores.may_repeat(list(groups))

    def _put_back(self, step: Step) -> None:
        """After a step that failed: no unit of it has logits."""
        self.launcher.put_back(step)
        for unit in step.sampling():
            if isinstance(unit, Branch):
                self._group_of[unit.root].logits.pop(unit, None)

    def _step(self, step: Step) -> tuple[list[BeamGroup], list[Candidates]]:
        """Run a step. Returns the groups whose beams have all run, and the candidates for their next beams.

        Nothing is chosen here: the step may run out of memory, and is then run again.
        """
        self._picking = False
        batch = self.builder.build(step)
        sampling = step.sampling()
        beams = len(step.rows) + sum(
            chunk.end - chunk.begin for chunk in step.chunks if isinstance(chunk.unit, Branch) and not chunk.unit.width
        )
        stretch = self.timekeeper.launched(1, step.tokens - beams, beams)
        self.timekeeper.switch(self.timekeeper.launching)
        with self.launcher.surroundings():
            logits = self.launcher.logits(batch)
            self.timekeeper.switch("tokens")
            groups, logits = self._complete(sampling, self.runner.in_float32(logits))
            self._picking = True
            with self.launcher.owners_turn():  # guidance runs the model
                candidates = self.scores(groups, logits) if groups else []
        self.steps += 1
        self.model_tokens += step.tokens
        self.beam_tokens += beams
        self.timekeeper.collected(stretch)
        return groups, candidates

    def _complete(self, sampling: Sequence[Request], logits: torch.Tensor) -> tuple[list[BeamGroup], torch.Tensor]:
        """The groups whose logits are all there, and these logits [rows, vocabulary], in the order of the beams."""
        whole = self._whole(sampling)
        if whole is not None:
            return whole, logits[: len(sampling)]
        row_of: dict[Branch, int] = {}
        for row, unit in enumerate(sampling):
            assert isinstance(unit, Branch)
            group = self._group_of[unit.root]
            if unit is group.root and group.made:
                continue  # a prompt computed again for its beams: its logits have been used
            group.logits[unit] = None
            row_of[unit] = row
        touched = dict.fromkeys(self._group_of[unit.root] for unit in row_of)
        rows: list[int] = []
        earlier: list[torch.Tensor] = []  # logits of earlier steps
        for group in touched:
            for unit in group.beams or [group.root]:
                if unit not in row_of and unit in group.logits and group.complete:
                    rows.append(len(logits) + len(earlier))
                    earlier.append(group.logits[unit])
                elif unit in row_of and group.complete:
                    rows.append(row_of[unit])
                elif unit in row_of:  # a copy, as the next step overwrites them
                    group.logits[unit] = logits[row_of[unit]].clone()
        complete = [group for group in touched if group.complete]
        if earlier:
            logits = torch.cat([logits, torch.stack(earlier)])
        if rows == list(range(len(rows))):
            return complete, logits[: len(rows)]
        return complete, logits[torch.tensor(rows, dtype=torch.long, device=logits.device)]

    def _whole(self, sampling: Sequence[Request]) -> list[BeamGroup] | None:
        """The groups of a step that ran all of their beams, group by group, and nothing else; None of any other."""
        groups: dict[BeamGroup, list[Branch]] = {}
        row = 0
        while row < len(sampling):
            unit = sampling[row]
            assert isinstance(unit, Branch)
            group = self._group_of[unit.root]
            beams = group.beams or [group.root]
            if group.logits or sampling[row : row + len(beams)] != beams:
                return None
            groups[group] = beams
            row += len(beams)
        for group, beams in groups.items():
            group.logits = dict.fromkeys(beams)
        return list(groups)

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

    def _finished_in(self, searches: Searches) -> FinishedBeams:
        if searches not in self._finished:
            self._finished[searches] = FinishedBeams(*searches.scores.shape)
        return self._finished[searches]

    def _finish(self, group: BeamGroup, otherwise: FinishReason) -> None:
        """Fill in the group's answers. ``otherwise``: the reason of answers that nothing in their tokens ended."""
        searches, place = self.scores.place(group)
        scores = searches.scores[place].tolist()
        finished = self._finished_in(searches).of(place)
        for answer, best, score in zip(group.answers, finished, scores, strict=False):
            answer.generated, answer.parents = group.answer(best)
            answer.searched = group.made + (otherwise is not FinishReason.TIME)  # and the token just chosen
            answer.score = None if otherwise is FinishReason.TIME and not group.made else score
            answer.end(FinishReason.STOP if best.stopped else otherwise)
        group.root.end(otherwise)
        self.timekeeper.switch("scheduling")
        self.scheduler.finish(group.root)
        self.timekeeper.switch("tokens")

    def _out_of_time(self, group: BeamGroup) -> None:
        """The present beams compete with the finished ones for the answers. A prompt that had not begun has none."""
        if group.made:
            self._decoded += len(group.logits)
            searches, place = self.scores.place(group)
            running = searches.running[[place]]
            choice = searches.step([place], [group.made - 1], running, torch.ones_like(running, dtype=torch.bool))
            self._finished_in(searches).take(
                [place], [group.made], np.array(choice.answers), np.arange(group.width)[None]
            )
        self._finish(group, FinishReason.TIME)
