"""The launcher of a beam search: it finds candidates for the next beams of a prompt once all of its beams have run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...model.batch import ModelBatch
from ...model.transfers import to_device
from ...planning.requests_and_prefixes import Branch, Request
from ..device_loop.steps_as_graphs import GraphLauncher
from ..timekeeper import Timekeeper
from .candidates import BeamScores, Candidates
from .group import BeamGroup


class BeamLauncher(GraphLauncher):
    """A ``Launcher``: what comes of a step are the candidates of the groups whose beams have then all run.

    groups: by their roots.
    """

    def __init__(
        self, groups: Mapping[Request, BeamGroup], scores: BeamScores, timekeeper: Timekeeper, *given: Any
    ) -> None:
        super().__init__(*given)
        self.groups = groups
        self.scores = scores
        self.timekeeper = timekeeper
        self._picking = False

    def _launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], list[Candidates]]:
        """Nothing is chosen here: the step may run out of memory, and is then run again."""
        self._picking = False
        logits = self.logits(batch)
        self.timekeeper.switch("tokens")
        groups, logits = self._complete(sampling, self.runner.in_float32(logits))
        self._picking = True
        with self.users_turn():  # guidance runs the model
            return self.scores(groups, logits) if groups else list

    def may_repeat(self, sampling: Sequence[Request]) -> bool:
        return not self._picking or self.scores.may_repeat(list(dict.fromkeys(map(self._group_of, sampling))))

    def _put_back(self, going: Sequence[Request]) -> None:
        """No unit of the step has logits."""
        for unit in going:
            self._group_of(unit).logits.pop(unit, None)

    def _group_of(self, unit: Request) -> BeamGroup:
        assert isinstance(unit, Branch)
        return self.groups[unit.root]

    def _complete(self, sampling: Sequence[Request], logits: torch.Tensor) -> tuple[list[BeamGroup], torch.Tensor]:
        """The groups whose logits are all there, and these logits [rows, vocabulary], in the order of the beams."""
        whole = self._whole(sampling)
        if whole is not None:
            return whole, logits[: len(sampling)]
        row_of: dict[Request, int] = {}
        for row, unit in enumerate(sampling):
            group = self._group_of(unit)
            if unit is group.root and group.made:
                continue  # a prompt computed again for its beams: its logits have been used
            group.logits[unit] = None
            row_of[unit] = row
        touched = dict.fromkeys(map(self._group_of, row_of))
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
            group = self._group_of(sampling[row])
            beams = group.beams or [group.root]
            if group.logits or sampling[row : row + len(beams)] != beams:
                return None
            groups[group] = beams
            row += len(beams)
        for group, beams in groups.items():
            group.logits = dict.fromkeys(beams)
        return list(groups)
