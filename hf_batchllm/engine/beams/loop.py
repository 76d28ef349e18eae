"""The loop of a beam search: next step, build, run; once all beams of a prompt have run, choose its next beams.

On a GPU large searches take turns: while the device runs the step of one half of the groups, the host chooses the next
beams of the other half. A group has a part in one step at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch

from ...model.batch_builder import BatchBuilder
from ...model.transfers import to_device
from ...planning.requests_and_prefixes import Branch, FinishReason, Request
from ...planning.step import Step
from ..device_errors import name_what_ran
from ..device_loop.steps_as_graphs import StepsAsGraphs
from ..smaller_steps import SmallerSteps
from ..timekeeper import Stretch, Timekeeper
from .candidates import BeamScores, Candidates
from .ended_candidates import BeamEndings
from .finished_beams import FinishedBeams
from .group import BeamGroup
from .scheduler import BeamScheduler
from .search_rules import Searches


@dataclass
class Flight:
    """A step that was launched, and whose candidates have not been chosen from yet."""

    step: Step
    roots: set[Request]  # of all groups that have a part in it
    complete: list[BeamGroup]  # those whose beams have then all run
    wait: Callable[[], list[Candidates]]
    record: Stretch
    replayed: bool  # as a CUDA graph


class BeamEngine:
    """``depth``: launched steps after which the host waits for the oldest. With two, the groups take turns."""

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
        depth: int = 1,
    ) -> None:
        self.depth = scheduler.depth = depth
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
        # Called before each step with what it is, where several ranks run the model together.
        self.meet: Callable[[int], None] | None = None
        self.after_waiting: Callable[[], None] = lambda: None  # an error where the device's numbers mean nothing
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
        flights: deque[Flight] = deque()
        switch = self.timekeeper.switch
        step: Step | None = None
        try:
            while True:
                switch("scheduling")
                # These go first: nothing is launched before, but for a step that has begun in parts.
                late = [] if self.smaller.waiting else self.endings.late()
                step = None if late else self._next(must_wait=bool(flights))
                if self.meet is not None:
                    self.meet(len(late) if step is None else step.number())
                finished: list[BeamGroup] = []
                if step is not None:
                    self._try(step, flights)
                elif late and not flights:
                    finished = [self._group_of[root] for root in late]
                    for group in finished:
                        self._out_of_time(group)
                elif not flights:
                    return
                if flights and (step is None or len(flights) >= self.depth):
                    flight = flights[0]  # left in the queue: an error in between must find it
                    finished = self._collect(flight)
                    flights.popleft()
                    self.timekeeper.collected(flight.record)
                    if watch is not None:
                        switch("outside")
                        watch(flight.step, sum(len(group.answers) for group in flight.complete))
                for group in finished:
                    switch("results")
                    yield from group.answers
        except Exception as error:
            name_what_ran(error, [(flight.step, flight.replayed) for flight in flights], step, self.launcher.replays)
            raise
        finally:  # after an error or an interrupt
            for flight in flights:
                self.timekeeper.collected(flight.record)

    def _next(self, must_wait: bool) -> Step | None:
        """The next step; None if there is none, or if the launched one must be seen first."""
        if self.smaller.waiting:
            part = None if must_wait else self.smaller.next(self._put_back)
            if must_wait or part is not None:
                return part
        if must_wait and not self.scheduler.takes_turns:
            return None
        step = self.scheduler.next()
        return self._next(must_wait) if step is not None and self.smaller.cut(step) else step

    def _try(self, step: Step, flights: deque[Flight]) -> None:
        """Launch a step. If it runs out of memory, its parts wait until the others have been seen."""
        try:
            flights.append(self._step(step))
        except Exception as error:
            if not self.smaller.takes(error, step, partial(self._may_repeat, step)):
                raise
        else:
            self.smaller.ran()
            self.scheduler.on_their_way |= flights[-1].roots

    def _collect(self, flight: Flight) -> list[BeamGroup]:
        """Wait for the candidates of a step, and choose among them. Returns the groups whose search is over."""
        self.timekeeper.switch("model")
        candidates = flight.wait()
        self.after_waiting()
        self.timekeeper.switch("tokens")
        self.scheduler.on_their_way -= flight.roots
        with self.launcher.surroundings(), self.launcher.owners_turn():  # criteria may run it
            return [group for each in candidates for group in self.choose(each)]

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

    def _step(self, step: Step) -> Flight:
        """Launch a step, and what finds the candidates of the groups whose beams have then all run.

        Nothing is chosen here: the step may run out of memory, and is then run again.
        """
        self._picking = False
        batch = self.builder.build(step)
        sampling = step.sampling()
        beams = len(step.rows) + sum(
            chunk.end - chunk.begin for chunk in step.chunks if isinstance(chunk.unit, Branch) and not chunk.unit.width
        )
        record = self.timekeeper.launched(1, step.tokens - beams, beams)
        self.timekeeper.switch(self.timekeeper.launching)
        with self.launcher.surroundings():
            logits = self.launcher.logits(batch)
            self.timekeeper.switch("tokens")
            groups, logits = self._complete(sampling, self.runner.in_float32(logits))
            self._picking = True
            with self.launcher.owners_turn():  # guidance runs the model
                wait: Callable[[], list[Candidates]] = self.scores(groups, logits) if groups else list
        self.steps += 1
        self.model_tokens += step.tokens
        self.beam_tokens += beams
        units = chain(step.rows, (chunk.unit for chunk in step.chunks))
        roots: set[Request] = {unit.root for unit in units if isinstance(unit, Branch)}
        return Flight(step, roots, groups, wait, record, self.launcher.replays)

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
        return complete, logits[to_device(np.array(rows, dtype=np.int64), logits.device)]

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
