"""What a call of a pool has to do, checked: its units, parts of it for workers, and results as the caller gets them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ..config import BatchConfig
from ..engine.id_lists import IdLists
from ..engine.job import Job
from ..engine.scoring.score_call import ScoreJob
from ..engine.unfinished import Finished, FinishedGenerations, FinishedScores
from ..errors import PromptError
from ..inputs.as_passed import AsPassed
from ..inputs.prompts import Prompt
from ..planning.call_plan import CallPlan
from ..planning.pieces import Split, TokenCosts, split_plan
from ..planning.sharing import make_plan
from ..results.sharing_plan import SharingPlan
from .parts import GeneratePart, Part, ScorePart

Key = tuple[int, int]  # of a result: prompt and sample, or context and continuation


class Work(ABC):
    """Units are never parted. ``job``: what the engine is asked for, were it one process; ``keyed``: its prompts."""

    def __init__(self, job: Job, keyed: Sequence[Prompt], config: BatchConfig) -> None:
        self.job = job
        self.keyed = keyed
        self._config = config

    # -- the plan ------------------------------------------------------------------------------------------------

    @cached_property
    def plan(self) -> SharingPlan:
        """Of all sequences, for the report."""
        job = self.job
        plan: SharingPlan = CallPlan(self.keyed, job.runs, job.max_new_tokens, job.widths, self._config).sharing
        return plan

    @property
    def sequences(self) -> list[Prompt]:
        """The prompts of the plan: each once for each of its sequences."""
        return [prompt for prompt, count in zip(self.keyed, self.job.runs, strict=True) for _ in range(count)]

    def split(self, processes: int, costs: TokenCosts) -> Split:
        """Pieces of prompts, which ``unit`` turns into units."""
        job = self.job
        samples = job.samples if job.widths is None else job.widths
        tokens = [count * new for count, new in zip(samples, job.max_new_tokens, strict=True)]
        once = all(count == 1 for count in samples)
        plan = self.plan if once else make_plan(list(self.keyed), self._config, tokens)
        return split_plan(plan, tokens, processes, costs, samples)

    # -- units ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def unit(self, place: int) -> int:
        """Of a prompt, by its place in the job."""

    @abstractmethod
    def unit_of(self, key: Key) -> int: ...

    @abstractmethod
    def keys(self, unit: int) -> list[Key]:
        """The results that come of a unit."""

    @property
    @abstractmethod
    def prompt_tokens(self) -> int:
        """Those that each result by itself would run over, added up."""

    @abstractmethod
    def part(self, units: Sequence[int]) -> Part: ...

    # -- results -------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def problems(self) -> dict[Any, str]:
        """What cannot be run, and why; units that do not fit come in later."""

    @abstractmethod
    def problem_units(self, problems: dict[Any, str]) -> list[int]:
        """The units with these problems."""

    @abstractmethod
    def error(self) -> PromptError: ...

    @abstractmethod
    def failures(self) -> Iterator[Any]:
        """A result for each thing that cannot be run."""

    @abstractmethod
    def key(self, result: Any) -> Key: ...

    @abstractmethod
    def whole(self, result: Any) -> Any:
        """A result with what the worker left out."""

    @abstractmethod
    def finished(self) -> Finished[Any]:
        """A place for results."""


class GenerateWork(Work):
    """A unit is a prompt, by its number in the list that was passed."""

    def __init__(self, job: Job, keyed: Sequence[Prompt], passed: list[AsPassed], config: BatchConfig) -> None:
        super().__init__(replace(job, passed=passed), keyed, config)
        self._place_of = {number: place for place, number in enumerate(job.places)}
        self._id_lists = IdLists()

    def unit(self, place: int) -> int:
        return self.job.places[place]

    def unit_of(self, key: Key) -> int:
        return key[0]

    def keys(self, unit: int) -> list[Key]:
        return [(unit, sample) for sample in range(self.job.options[unit].num_return_sequences)]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) * count for prompt, count in zip(self.job.prompts, self.job.samples, strict=True))

    def part(self, units: Sequence[int]) -> Part:
        job, places = self.job, [self._place_of[unit] for unit in units]
        return GeneratePart(
            replace(
                job,
                prompts=[job.prompts[place] for place in places],
                places=list(units),
                max_new_tokens=[job.max_new_tokens[place] for place in places],
                can_stop=[job.can_stop[place] for place in places],
                problems={},
                passed=None,
            )
        )

    @property
    def problems(self) -> dict[Any, str]:
        return self.job.problems

    def problem_units(self, problems: dict[Any, str]) -> list[int]:
        return list(problems)

    def error(self) -> PromptError:
        return PromptError(self.job.problems)

    def failures(self) -> Iterator[Any]:
        return self.job.failures()

    def key(self, result: Any) -> Key:
        return result.index, result.sample

    def whole(self, result: Any) -> Any:
        ids = self._id_lists.of(self.job.prompts[self._place_of[result.index]].ids)
        return replace(result, prompt_token_ids=ids, prompt=self.job.prompt_as_passed(result.index))

    def finished(self) -> Finished[Any]:
        made = FinishedGenerations()
        made.expected = self.job.sequences
        return made


class ScoreWork(Work):
    """A unit is a sequence that scores are read from, by its number."""

    def __init__(self, job: ScoreJob, keyed: Sequence[Prompt], config: BatchConfig) -> None:
        super().__init__(job.job, keyed, config)
        self.scores = job
        items = job.inputs.items
        self._places = [[(items[number].index, items[number].choice) for number in each] for each in job.readers]
        self._unit_of = {place: unit for unit, places in enumerate(self._places) for place in places}

    def unit(self, place: int) -> int:
        return place

    def unit_of(self, key: Key) -> int:
        return self._unit_of[key]

    def keys(self, unit: int) -> list[Key]:
        return list(self._places[unit])

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.ids) - 1 for item in self.scores.inputs.items)

    def part(self, units: Sequence[int]) -> Part:
        inputs, readers = self.scores.inputs, self.scores.readers
        numbers = sorted(number for unit in units for number in readers[unit])
        items = [inputs.items[number] for number in numbers]
        unit_of = {place: unit for unit in units for place in self._places[unit]}
        return ScorePart(replace(inputs, items=items, problems={}, texts={}), unit_of)

    @property
    def problems(self) -> dict[Any, str]:
        return self.scores.inputs.problems

    def problem_units(self, problems: dict[Any, str]) -> list[int]:
        return sorted({self._unit_of[place] for place in problems})

    def error(self) -> PromptError:
        return self.scores.inputs.error()

    def failures(self) -> Iterator[Any]:
        return self.scores.failures()

    def key(self, result: Any) -> Key:
        return result.index, result.choice

    def whole(self, result: Any) -> Any:
        return result

    def finished(self) -> Finished[Any]:
        made = FinishedScores()
        made.inputs, made.expected = self.scores.inputs, len(self.scores.inputs.items)
        return made
