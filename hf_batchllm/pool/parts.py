"""A part of a call, as a worker runs it: some prompts of ``generate``, or some sequences of ``score``.

A *unit* is what is never parted: a prompt with all of its samples, or a sequence from which scores are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from ..engine.call import Call
from ..engine.extra_outputs import ExtraOutputs
from ..engine.job import Job
from ..engine.scoring.score_call import ScoreJob, ScoreOutputs
from ..engine.scoring.score_inputs import Place, ScoreInputs
from ..planning.requests_and_prefixes import Request
from .part_generator import PartGenerator

Finish = Callable[[Request], list[Any]]  # a request that has ended -> its results


class Part(Protocol):
    """Problems: of prompts that do not fit into the worker's memory, by their number in the list, or by their place."""

    def piece_of(self, pieces: Mapping[int, list[int]]) -> dict[int, int]:
        """The piece of each request, by the number that requests have here. ``pieces``: the units of each piece."""

    def begin(self, generator: PartGenerator, call: Call) -> Finish: ...

    @property
    def problems(self) -> dict[Any, str]: ...


@dataclass
class GeneratePart:
    """A unit is a prompt, by its number in the list that was passed."""

    job: Job

    def piece_of(self, pieces: Mapping[int, list[int]]) -> dict[int, int]:
        return {place: piece for piece, places in pieces.items() for place in places}

    def begin(self, generator: PartGenerator, call: Call) -> Finish:
        self.job = replace(self.job, rules=generator.rules_of(self.job), grammars=generator.grammars_of(self.job))
        outputs = ExtraOutputs(self.job.options)
        call.begin(self.job, outputs, strict=False)
        # The pool knows the prompts.
        return lambda request: [replace(generator._generation(request, call, outputs), prompt_token_ids=[])]

    @property
    def problems(self) -> dict[Any, str]:
        return self.job.problems


@dataclass
class ScorePart:
    """A unit is a sequence, by its number in the whole call. ``unit_of``: of each continuation."""

    inputs: ScoreInputs
    unit_of: dict[Place, int]

    @cached_property
    def _job(self) -> ScoreJob:
        return ScoreJob.of(self.inputs)

    def piece_of(self, pieces: Mapping[int, list[int]]) -> dict[int, int]:
        piece_of_unit = {unit: piece for piece, units in pieces.items() for unit in units}
        firsts = [self.inputs.items[numbers[0]] for numbers in self._job.readers]
        return {sequence: piece_of_unit[self.unit_of[item.index, item.choice]] for sequence, item in enumerate(firsts)}

    def begin(self, generator: PartGenerator, call: Call) -> Finish:
        outputs = ScoreOutputs(self._job)
        with self._job.problems_named():
            call.begin(self._job.job, outputs, strict=False)
        return lambda request: generator.scores_of(request, call, outputs)

    @property
    def problems(self) -> dict[Any, str]:
        return self.inputs.problems
