"""The loop of a beam search: next step, build, run; where all beams of a prompt have come by, choose who goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ...model.batch import BatchBuilder
from ...model.runner import ModelRunner, current_device
from ...planning.units import Branch, FinishReason, Request, Step
from ..timekeeper import Timekeeper
from .candidates import BeamScores, Candidates
from .group import BeamChoice, BeamGroup
from .scheduler import BeamScheduler
from .stopping import BeamEndings


class BeamEngine:
    def __init__(
        self,
        scheduler: BeamScheduler,
        builder: BatchBuilder,
        runner: ModelRunner,
        groups: Sequence[BeamGroup],
        scores: BeamScores,
        endings: BeamEndings,
        timekeeper: Timekeeper,
    ) -> None:
        self.scheduler = scheduler
        self.builder = builder
        self.runner = runner
        self.groups = groups
        self.answers = [answer for group in groups for answer in group.answers]
        self.scores = scores
        self.endings = endings
        self.timekeeper = timekeeper
        self.steps = 0
        self.model_tokens = 0
        self.idle_tokens = 0
        self.beam_tokens = 0  # of those, all but prompts'
        self._decoded = 0  # and those among them that were run for the first time, and chosen from
        self._of = {group.root: group for group in groups}

    @property
    def decoded(self) -> int:
        """Of the beams' tokens, those that were run for the first time."""
        return self._decoded + sum(len(group.logits) for group in self.groups if group.beams)

    def run(self, watch: Callable[[Step, int], None] | None = None) -> Iterator[Request]:
        """Answers as they are found, those of a prompt together.

        ``watch`` is told of every step that has been run, and how many tokens of answers it brought.
        """
        switch = self.timekeeper.switch
        while True:
            switch("scheduling")
            if late := self.endings.late():
                finished = [self._of[root] for root in late]
                for group in finished:
                    self._out_of_time(group)
            else:
                step = self.scheduler.next()
                if step is None:
                    return
                finished, chosen = self._step(step)
                if watch is not None:
                    switch("outside")
                    watch(step, sum(len(group.answers) for group in chosen))
            for group in finished:
                switch("results")
                yield from group.answers

    def _step(self, step: Step) -> tuple[list[BeamGroup], list[BeamGroup]]:
        """The groups that have come to their end with it, and all that have come further."""
        batch = self.builder.build(step)
        sampling = step.sampling()
        beams = len(step.rows) + sum(
            chunk.end - chunk.begin for chunk in step.chunks if isinstance(chunk.unit, Branch) and not chunk.unit.width
        )
        self.steps += 1
        self.model_tokens += step.tokens
        self.beam_tokens += beams
        stretch = self.timekeeper.launched(1, step.tokens - beams, beams)
        self.timekeeper.switch(self.timekeeper.launching)
        with current_device(self.runner.architecture.device):
            logits = self.runner.step(batch)
            self.timekeeper.switch("tokens")
            groups, logits = self._complete(sampling, self.runner.in_float32(logits))
            finished = []
            with self.runner.adapted():  # guidance runs the model
                for candidates in self.scores(groups, logits) if groups else []:
                    finished += self.choose(candidates)
        self.timekeeper.collected(stretch)
        return finished, groups

    def _complete(self, sampling: Sequence[Request], logits: torch.Tensor) -> tuple[list[BeamGroup], torch.Tensor]:
        """The groups all of whose logits are there, and those [rows, vocabulary], in the order of their beams."""
        row_of = {}
        for row, unit in enumerate(sampling):
            group = self._of[unit.root]
            if unit is group.root and group.made:
                continue  # computed again, to be read by its beams
            group.logits[unit] = None
            row_of[unit] = row
        touched = dict.fromkeys(self._of[unit.root] for unit in row_of)
        rows, held = [], []
        for group in touched:
            for unit in group.beams or [group.root]:
                if unit not in row_of and unit in group.logits and group.complete:
                    rows.append(len(logits) + len(held))
                    held.append(group.logits[unit])
                elif unit in row_of and group.complete:
                    rows.append(row_of[unit])
                elif unit in row_of:  # the next step overwrites them
                    group.logits[unit] = logits[row_of[unit]].clone()
        complete = [group for group in touched if group.complete]
        if held:
            logits = torch.cat([logits, torch.stack(held)])
        if rows == list(range(len(rows))):
            return complete, logits[: len(rows)]
        return complete, logits[torch.tensor(rows, device=logits.device)]

    def choose(self, candidates: Candidates) -> list[BeamGroup]:
        """Who goes on, and which answers there are. Returns the groups whose search is over."""
        groups, parents, tokens = candidates.groups, candidates.parents.numpy(), candidates.tokens.numpy()
        made = [group.made for group in groups]
        stops = np.stack([self.endings.of_candidates(*each) for each in zip(groups, parents, tokens, strict=True)])
        full = np.array([group.made + 1 >= group.root.max_new_tokens for group in groups])
        ends = torch.from_numpy(stops | full[:, None])
        choice = candidates.searches.step(candidates.places, made, candidates.scores, ends)
        finished = []
        for number, group in enumerate(groups):
            own = parents[number].tolist(), tokens[number].tolist(), stops[number].tolist()
            self._keep(group, choice.kept[number], own)
            self._decoded += len(group.beams)
            if choice.over[number]:
                self._finish(group, FinishReason.LENGTH)
                finished.append(group)
            else:
                going_on = choice.running[number]
                group.fork([own[0][each] for each in going_on], [own[1][each] for each in going_on])
        return finished

    def _keep(self, group: BeamGroup, kept: Sequence[int], own: tuple[list[int], list[int], list[bool]]) -> None:
        before, (parents, tokens, stops) = group.slots, own
        if list(kept) == list(range(group.width)):
            return
        group.slots = []
        for each in kept:
            if each < group.width:
                group.slots.append(before[each])
                continue
            place = each - group.width
            parent = parents[place]
            history = group.parents[parent] if group.beams else []
            group.slots.append(BeamChoice([*group.tokens(parent), tokens[place]], [*history, parent], stops[place]))

    def _finish(self, group: BeamGroup, otherwise: FinishReason) -> None:
        """``otherwise``: why answers have ended that no token ended."""
        searches, place = self.scores.place(group)
        scores = searches.scores[place].tolist()
        for answer, found, score in zip(group.answers, group.slots, scores, strict=False):
            answer.generated, answer.parents = found.tokens, found.parents
            answer.searched = group.made + (otherwise is not FinishReason.TIME)  # with the one just chosen
            answer.score = None if otherwise is FinishReason.TIME and not group.made else score
            answer.end(FinishReason.STOP if found.stopped else otherwise)
        group.root.end(otherwise)
        self.timekeeper.switch("scheduling")
        self.scheduler.finish(group.root)
        self.timekeeper.switch("tokens")

    def _out_of_time(self, group: BeamGroup) -> None:
        """The beams that there are take their places among the answers; a prompt that had not begun has none."""
        if group.made:
            self._decoded += len(group.logits)
            searches, place = self.scores.place(group)
            tokens = group.all_tokens()
            running = searches.running[[place]]
            choice = searches.step([place], [group.made - 1], running, torch.ones_like(running, dtype=torch.bool))
            before = group.slots
            group.slots = [
                before[each]
                if each < group.width
                else BeamChoice(tokens[each - group.width], group.parents[each - group.width])
                for each in choice.kept[0]
            ]
        self._finish(group, FinishReason.TIME)
