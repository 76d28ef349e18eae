"""What a call of several processes has to do, checked: its plan, parts of it, and results as the caller gets them.

A *unit* is what is never parted: a prompt with all of its samples, or a sequence from which scores are read. Its number
is its place in the job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from ..config import BatchConfig
from ..engine.id_lists import IdLists
from ..engine.job import Job
from ..engine.scoring.score_call import ScoreJob
from ..engine.unfinished import Finished, FinishedGenerations, FinishedScores
from ..errors import PromptError
from ..inputs.as_passed import as_passed
from ..inputs.padded_batch import take_padded
from ..inputs.prompts import Prompt, as_list
from ..inputs.token_ids import with_arrays
from ..planning.call_plan import CallPlan
from ..planning.pieces import Split, TokenCosts, split_plan
from ..planning.sharing import make_plan
from ..results.generations import Generation
from ..results.scores import Score
from ..results.sharing_plan import SharingPlan
from .parts import GeneratePart, Part, ScorePart

Key = tuple[int, int]  # of a result: prompt and sample, or context and continuation


def key_of(result: Generation | Score) -> Key:
    return result.index, result.sample if isinstance(result, Generation) else result.choice


class Work(ABC):
    """``job``: what the engine is asked for, were it one process. ``keys``: of the results that come of each unit.

    problems: what cannot be run, and why; units that do not fit come in later.
    prompt_tokens: those that each result by itself would run over, added up.
    """

    prompt_tokens: int
    finished: Finished[Any]  # a place for results

    def __init__(self, job: Job, keys: list[list[Key]], problems: dict[Any, str], config: BatchConfig) -> None:
        self.job = job
        self.keys = keys
        self.unit_of = {key: unit for unit, some in enumerate(keys) for key in some}
        self.problems = problems
        self._config = config

    @cached_property
    def plan(self) -> SharingPlan:
        """The plan of all sequences, for the report."""
        job = self.job
        plan: SharingPlan = CallPlan(job.prompts, job.runs, job.max_new_tokens, job.widths, self._config).sharing
        return plan

    @property
    def sequences(self) -> list[Prompt]:
        """The prompts of the plan: each once for each of its sequences."""
        return [prompt for prompt, count in zip(self.job.prompts, self.job.runs, strict=True) for _ in range(count)]

    def split(self, processes: int, costs: TokenCosts) -> Split:
        """Pieces of units."""
        job = self.job
        samples = job.samples if job.widths is None else job.widths
        tokens = [count * new for count, new in zip(samples, job.max_new_tokens, strict=True)]
        once = all(count == 1 for count in samples)
        plan = self.plan if once else make_plan(job.prompts, self._config, tokens)
        return split_plan(plan, tokens, processes, costs, samples)

    def units_with(self, problems: Iterable[int | Key]) -> set[int]:
        """Those of prompts, or of continuations, by what ``problems`` has them under."""
        return {self.unit_of[(each, 0) if isinstance(each, int) else each] for each in problems}

    @abstractmethod
    def part(self, units: Sequence[int]) -> Part:
        """The work of some units, in their order."""

    @abstractmethod
    def error(self) -> PromptError: ...

    @abstractmethod
    def failures(self) -> Iterator[Any]:
        """A result for each thing that cannot be run."""

    def whole(self, result: Any) -> Any:
        """A result with what the worker left out."""
        return result


class GenerateWork(Work):
    def __init__(self, job: Job, config: BatchConfig) -> None:
        counted = zip(job.places, job.samples, strict=True)
        keys = [[(number, sample) for sample in range(count)] for number, count in counted]
        super().__init__(job, keys, job.problems, config)
        self.prompt_tokens = sum(len(prompt) * count for prompt, count in zip(job.prompts, job.samples, strict=True))
        self.finished = FinishedGenerations()
        self.finished.expected = job.sequences
        self._id_lists = IdLists()

    @classmethod
    def checked(
        cls,
        ask: Callable[..., Any],  # PartGenerator.checked_job of the process that checks
        prompts: Any,
        settings: tuple[Any, ...],  # the further arguments of ``generate`` in their order, the last ones as a dict
        names: Sequence[str] | None,  # of the prompts, in warnings
        config: BatchConfig,
    ) -> GenerateWork:
        if take_padded(prompts, settings[-1]) is not None:
            raise ValueError(
                "several processes take a list of prompts: pass a tensor's rows as a list, without padding"
            )
        passed = listed(as_list(prompts))
        arrays = with_arrays(passed)
        job: Job = ask(arrays, *settings, names)
        good = zip(job.places, job.prompts, strict=True)
        job = replace(
            job,
            prompts=[prompt if len(prompt) else Prompt(arrays[place], prompt.key) for place, prompt in good],
            passed=as_passed(passed),
        )
        if job.seed_is_drawn:  # of this process's random numbers, as one process would
            job = replace(job, seed=int(torch.randint(2**63 - 1, (), device="cpu").item()))
        return cls(job, config)

    def part(self, units: Sequence[int]) -> Part:
        job = self.job
        return GeneratePart(
            replace(
                job,
                prompts=[job.prompts[unit] for unit in units],
                places=[job.places[unit] for unit in units],
                max_new_tokens=[job.max_new_tokens[unit] for unit in units],
                can_stop=[job.can_stop[unit] for unit in units],
                problems={},
                passed=None,
            )
        )

    def error(self) -> PromptError:
        return PromptError(self.job.problems)

    def failures(self) -> Iterator[Any]:
        return self.job.failures()

    def whole(self, result: Any) -> Any:
        ids = self._id_lists.of(self.job.prompts[self.unit_of[result.index, 0]].ids)
        return replace(result, prompt_token_ids=ids, prompt=self.job.prompt_as_passed(result.index))


class ScoreWork(Work):
    def __init__(self, scores: ScoreJob, config: BatchConfig) -> None:
        self.scores = scores
        inputs = scores.inputs
        keys = [[(inputs.items[each].index, inputs.items[each].choice) for each in some] for some in scores.readers]
        super().__init__(scores.job, keys, inputs.problems, config)
        self.prompt_tokens = sum(len(item.ids) - 1 for item in inputs.items)
        self.finished = FinishedScores()
        self.finished.inputs, self.finished.expected = inputs, len(inputs.items)

    @classmethod
    def checked(
        cls,
        ask: Callable[..., ScoreJob],  # PartGenerator.checked_scores of the process that checks
        given: tuple[Any, ...],  # the arguments of ``score`` in their order
        config: BatchConfig,
    ) -> ScoreWork:
        return cls(ask(*(listed(each) if isinstance(each, Iterator) else each for each in given)), config)

    def part(self, units: Sequence[int]) -> Part:
        inputs, readers = self.scores.inputs, self.scores.readers
        items = [inputs.items[number] for number in sorted(number for unit in units for number in readers[unit])]
        return ScorePart(replace(inputs, items=items, problems={}, texts={}), len(units))

    def error(self) -> PromptError:
        return self.scores.inputs.error()

    def failures(self) -> Iterator[Any]:
        return self.scores.failures()


def listed(prompts: Any) -> list[Any] | tuple[Any, ...]:
    """The prompts in a form that can be sent: a generator cannot."""
    return prompts if isinstance(prompts, list | tuple) else list(prompts)
