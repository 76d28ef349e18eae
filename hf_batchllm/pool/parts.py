"""A part of a call, as a worker runs it: some prompts of ``generate``, or some sequences of ``score``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from ..engine.call import Call
from ..engine.extra_outputs import ExtraOutputs
from ..engine.job import Job
from ..engine.scoring.score_call import ScoreJob, ScoreOutputs
from ..engine.scoring.score_inputs import ScoreInputs
from ..planning.requests_and_prefixes import Request
from .part_generator import PartGenerator

Finish = Callable[[Request], list[Any]]  # a request that has ended -> its results


class Part(Protocol):
    """Problems: of prompts that do not fit into the worker's memory, by their number in the list, or by their place."""

    @property
    def numbers(self) -> Sequence[int]:
        """Those that the requests of each unit have here, in the order of the units."""

    def begin(self, generator: PartGenerator, call: Call) -> Finish: ...

    @property
    def problems(self) -> dict[Any, str]: ...


@dataclass
class GeneratePart:
    job: Job

    @property
    def numbers(self) -> Sequence[int]:
        return self.job.places

    def begin(self, generator: PartGenerator, call: Call) -> Finish:
        options, grammars = self.job.options, self.job.grammars
        if grammars is not None:
            grammars = grammars.here(options, generator._tokenizer.required, generator.architecture.vocab_size)
        self.job = replace(self.job, rules=generator._checks.rules.of_each(options), grammars=grammars)
        outputs = ExtraOutputs(options)
        call.begin(self.job, outputs, strict=False)
        # The pool knows the prompts.
        return lambda request: [replace(generator._generation(request, call, outputs), prompt_token_ids=[])]

    @property
    def problems(self) -> dict[Any, str]:
        return self.job.problems


@dataclass
class ScorePart:
    """With all items of each sequence. So sequences have the order here that they have in the whole call."""

    inputs: ScoreInputs
    sequences: int

    @cached_property
    def _job(self) -> ScoreJob:
        return ScoreJob.of(self.inputs)

    @property
    def numbers(self) -> Sequence[int]:
        return range(self.sequences)

    def begin(self, generator: PartGenerator, call: Call) -> Finish:
        outputs = ScoreOutputs(self._job)
        with self._job.problems_named():
            call.begin(self._job.job, outputs, strict=False)
        decode = generator._tokenizer.decode
        return lambda request: [*outputs.scores(request, decode, call.adapter_for(request.index))]

    @property
    def problems(self) -> dict[Any, str]:
        return self.inputs.problems
