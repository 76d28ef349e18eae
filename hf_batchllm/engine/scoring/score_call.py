"""How ``score`` runs: few sequences from which all items are read, with logits only where an item needs them.

The logits at a position tell of the next token, so the last token of an item is looked up and never runs. Items that
differ in their last token alone (answers of a single token) are read from one sequence: their context.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np
from transformers import GenerationConfig

from ...errors import PromptError
from ...inputs.options import Options
from ...inputs.prompts import Prompt
from ...model.batch import ModelBatch
from ...model.runner import ModelRunner
from ...model.transfers import start_copy_to_host
from ...planning.requests_and_prefixes import Request
from ...planning.step import Step
from ...results.run_report import RunReport
from ...results.scores import Score
from ...results.sharing_plan import SharingPlan
from ...sampling.logprobs import LOGITS_AT_ONCE, log_probs_of_tokens
from ...sampling.stop_rules import StopRules
from ..call_outputs import MOST_LOGITS, CallOutputs, ScoreCounts
from ..job import Job
from ..loop import Launcher
from ..timekeeper import Timekeeper
from .score_inputs import ScoreInputs, ScoreItem
from .token_lookups import Lookups


def options_of_scores() -> Options:
    """Each sequence gets one token, which is ignored: its logits are what is wanted."""
    return Options(
        config=GenerationConfig(max_new_tokens=1, do_sample=False),
        eos_token_ids=frozenset(),
        pad_token_id=None,
        do_sample=False,
        num_return_sequences=1,
        has_default_length=False,
    )


@dataclass
class ScoreJob:
    """What a call of ``score`` is asked for. The engine runs ``job``; each item is read from one of its prompts."""

    inputs: ScoreInputs
    job: Job
    sources: np.ndarray  # [items]  the job's prompt that each item is read from

    @classmethod
    def of(cls, inputs: ScoreInputs) -> ScoreJob:
        prompts, sources = sequences_to_run(inputs.items)
        count = len(prompts)
        job = Job(
            prompts,
            list(range(count)),
            {},
            [options_of_scores()] * count,
            [1] * count,
            [False] * count,
            None,
            [StopRules()] * count,
            adapters=None if inputs.adapters is None else [cast("str | None", prompt.key) for prompt in prompts],
        )
        return cls(inputs, job, sources)

    @cached_property
    def readers(self) -> list[list[int]]:
        """For each prompt of the job, the items that are read from it."""
        order = np.argsort(self.sources, kind="stable")
        ends = np.cumsum(np.bincount(self.sources, minlength=len(self.job.prompts)))
        return [some.tolist() for some in np.split(order, ends[:-1])] if len(ends) else []

    def _move_problems(self, problems: Mapping[int, str], strict: bool) -> None:
        """Turn problems of sequences into problems of items. ``strict``: only of items as long as their sequence."""
        for prompt, why in problems.items():
            for number in self.readers[prompt]:
                item = self.inputs.items[number]
                place = item.index, item.choice
                shorter = len(item.ids) - 1 < len(self.job.prompts[prompt])
                if shorter and strict:
                    continue
                self.inputs.problems[place] = f"would be read from a longer one, which {why}" if shorter else why
                if item.text is not None:
                    self.inputs.texts[place] = item.text

    @contextmanager
    def problems_named(self) -> Iterator[None]:
        """Errors about sequences that do not fit speak of contexts, which the caller knows."""
        try:
            yield
        except PromptError as error:
            self._move_problems(error.problems, strict=True)
            raise self.inputs.error() from None
        self._move_problems(self.job.problems, strict=False)

    def failures(self) -> Iterator[Score]:
        for (index, choice), why in self.inputs.problems.items():
            text, context = self.inputs.texts.get((index, choice)), self.inputs.context_as_passed(index)
            yield Score(index, choice, text, [], [], False, why, context)


def sequences_to_run(items: Sequence[ScoreItem]) -> tuple[list[Prompt], np.ndarray]:
    """The sequences to run, and for each item the number of its sequence. No sequence begins another one.

    In sorted order, a sequence stands right before the sequences that begin with it.
    """
    by_key: dict[Hashable, list[int]] = {}
    for number, item in enumerate(items):
        by_key.setdefault(item.key, []).append(number)
    packed = [np.ascontiguousarray(item.keys[:-1], np.int32).tobytes() for item in items]
    longest = np.arange(len(items))  # for each item, the item with the longest sequence that begins with its own
    for numbers in by_key.values():
        numbers.sort(key=packed.__getitem__)
        for number, following in zip(numbers[-2::-1], numbers[:0:-1], strict=True):
            if packed[following].startswith(packed[number]):
                longest[number] = longest[following]
    # In the order of the list.
    kept, first = np.unique(longest, return_index=True)
    order = np.argsort(first)
    place = np.empty(len(items), np.int64)
    place[kept[order]] = np.arange(len(kept))
    prompts = []
    for number in kept[order].tolist():
        item, keys = items[number], np.frombuffer(packed[number], np.int32)
        images = None if item.images is None else replace(item.images, keys=keys)
        prompts.append(Prompt(keys if images is None else item.ids[:-1], item.key, images))
    return prompts, place[longest]


class ScoreOutputs(CallOutputs):
    """Reads the scores of a call from the logits of its prompts."""

    def __init__(self, job: ScoreJob) -> None:
        self._job = job
        self.lookups = Lookups(job.inputs.items, job.readers)
        self.counts = self._counts(range(len(job.job.prompts)))

    def scores(
        self, request: Request, decode: Callable[[list[int]], str | None], adapter: str | None
    ) -> Iterator[Score]:
        """All scores that are read from ``request``, which has ended. ``adapter``: that it ran with."""
        for score in self.lookups.scores(request, decode):
            context = self._job.inputs.context_as_passed(score.index)
            yield replace(score, context=context, adapter=adapter)

    @property
    def watcher(self) -> Lookups:
        return self.lookups

    def in_report(self, report: RunReport, requests: Sequence[Request]) -> RunReport:
        every = self._counts(request.index for request in requests)
        ended = self._counts(request.index for request in requests if request.done)
        tokens = every.prompt_tokens
        needed = round((1 - report.saving) * report.prompt_tokens)
        return replace(
            report,
            sequences=every.scores,
            finished=ended.scores,
            prompt_tokens=tokens,
            saving=1 - needed / tokens if tokens else 0.0,
            new_tokens=0,
            scored_tokens=ended.scored_tokens,
        )

    def _counts(self, prompts: Iterable[int]) -> ScoreCounts:
        """The scores that are read from these prompts of the job."""
        job = self._job
        items = [job.inputs.items[number] for prompt in prompts for number in job.readers[prompt]]
        return ScoreCounts(
            len(items),
            sum(len(item.ids) - 1 for item in items),
            sum(len(item.ids) - item.first for item in items),
        )

    def most_rows(self, vocabulary: int) -> int:
        return max(1, MOST_LOGITS // vocabulary)

    def most_tokens(self, budget: int, vocabulary: int, plan: SharingPlan | None) -> int:
        return self.lookups.most_tokens(budget, self.most_rows(vocabulary), plan)

    def step_bytes(self, tokens: int, vocabulary: int) -> int:
        return 4 * 3 * min(min(tokens, self.most_rows(vocabulary)) * vocabulary, LOGITS_AT_ONCE)

    def launcher(self, runner: ModelRunner, timekeeper: Timekeeper) -> ScoreLauncher:
        return ScoreLauncher(runner, self.lookups, timekeeper)


class ScoreLauncher(Launcher):
    """Looks tokens up on the device. The figures come back later, behind an event: the next step need not wait."""

    def __init__(self, runner: ModelRunner, lookups: Lookups, timekeeper: Timekeeper) -> None:
        self._runner = runner
        self._lookups = lookups
        self._timekeeper = timekeeper

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        ignored = np.zeros((len(sampling), 1), np.int64)
        rows, places = self._lookups.pairs(sampling, batch.asked)
        with self._runner.surroundings():
            logits = self._runner.every_row(batch)
            if not len(rows):
                return lambda: ignored
            self._timekeeper.switch("tokens")
            found = log_probs_of_tokens(logits, rows, self._lookups.targets(places))
            logprobs, greedy = (start_copy_to_host(each) for each in found)

        def wait() -> np.ndarray:
            self._lookups.put(places, logprobs(), greedy())
            return ignored

        return wait

    def may_repeat(self, sampling: Sequence[Request]) -> bool:
        return True

    def put_back(self, step: Step) -> None:
        self._runner.restore()
        self._lookups.ask_again(step.chunks)
