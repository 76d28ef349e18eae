"""Who takes part: this library, ``model.generate`` at its best batch size, ``model.generate_batch``.

Each is given prompts and, for each of them, how many tokens its answer has. EOS is ignored, so every contender makes
the same number of tokens for the same prompt.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from ..engine.wiring import scheduler_for
from ..generator import BatchGenerator
from ..planning.base_scheduler import BaseScheduler
from ..planning.step import Step
from ..planning.units import Request
from ..results.run_report import RunReport

Prompts = list[list[int]]
Tokens = list[list[int]]
Answers = int | Sequence[int]  # new tokens: of each prompt, or of all
_PAGE, _SPARE_PAGES = 64, 64
_SLOWER = 1.02  # by so much a batch size must be slower than the best before larger ones are not tried


@dataclass(frozen=True)
class StepSize:
    """How large a step of the engine was."""

    rows: int  # decode rows
    chunk_tokens: int  # of prompts
    samples: int  # rows that went through the LM head

    @classmethod
    def of(cls, step: Step) -> StepSize:
        return cls(len(step.rows), step.tokens - len(step.rows), len(step.sampling()))


class RecordingScheduler:
    """Keeps a record of the steps that another scheduler makes.

    ``answers``: how long each answer becomes, where they differ. ``generate()`` takes one limit for the whole list, but
    a scheduler sees the requests before they run.
    """

    def __init__(self, inner: BaseScheduler) -> None:
        self.inner = inner
        self.sizes: list[StepSize] = []
        self.answers: Sequence[int] | None = None
        self.most_running = 0  # requests at once
        self.prompts_until = 0  # wall clock in ns: when the last step with a piece of a prompt was handed out

    def start(self, requests: Sequence[Request], *args: Any) -> None:
        self.sizes = []
        self.most_running = 0
        if self.answers is not None:
            for request in requests:
                request.max_new_tokens = self.answers[request.index]
        self.inner.start(requests, *args)

    def next(self) -> Step | None:
        step = self.inner.next()
        self.most_running = max(self.most_running, len(getattr(self.inner, "running", ())))
        if step is not None:
            self.sizes.append(StepSize.of(step))
            if step.chunks:
                self.prompts_until = time.time_ns()
        return step

    def finish(self, request: Request) -> None:
        self.inner.finish(request)

    @property
    def preemptions(self) -> int:
        return getattr(self.inner, "preemptions", 0)

    @property
    def runs_ahead(self) -> bool:
        return getattr(self.inner, "runs_ahead", False)

    def must_know(self) -> bool:
        return self.inner.must_know()  # type: ignore[attr-defined]

    def repeat(self, step: Step, most: int) -> int:
        """How many times in a row a step of decode rows is run."""
        repeat = getattr(self.inner, "repeat", None)
        times = 1 if repeat is None else repeat(step, most)
        self.sizes += [StepSize.of(step)] * (times - 1)
        return times


@dataclass
class Ours:
    model: PreTrainedModel
    fields: dict[str, Any] = field(default_factory=dict)  # of BatchConfig
    name: str = "hf_batchllm"
    report: RunReport | None = None

    def __post_init__(self) -> None:
        choice = self.fields.get("scheduler", "groups")
        self.scheduler = RecordingScheduler(scheduler_for(choice, self.model.device))
        self.fields = {**self.fields, "scheduler": self.scheduler}

    def run(self, prompts: Prompts, answers: Answers) -> Tokens:
        lengths = each(answers, prompts)
        self.scheduler.answers = lengths if min(lengths) < max(lengths) else None
        # What a user of one call would pay: the generator is made anew. No tokenizer is looked for.
        result = BatchGenerator(self.model, NoTokenizer(), **self.fields).generate(
            prompts, max_new_tokens=max(lengths), progress=False
        )
        self.report = result.report
        return result.token_ids


class NoTokenizer:
    """Prompts are token ids here, and nobody reads the text."""

    def __call__(self, texts: list[str]) -> dict[str, Tokens]:
        raise NotImplementedError("the prompts of a benchmark are token ids")

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return ""


@dataclass
class Generate:
    """Sorted by length, which serves it best: a batch is as wide as its longest prompt, and runs as long as its longest
    answer takes."""

    model: PreTrainedModel
    batch_size: int
    name: str = "model.generate"

    def run(self, prompts: Prompts, answers: Answers) -> Tokens:
        lengths = each(answers, prompts)
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        tokens: Tokens = [[] for _ in prompts]
        for begin in range(0, len(order), self.batch_size):
            places = order[begin : begin + self.batch_size]
            rows = [prompts[place] for place in places]
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self.model.device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.model.device)
            longest = max(lengths[place] for place in places)
            out = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest)
            for place, row in zip(places, out[:, width:].tolist(), strict=True):
                tokens[place] = _up_to_the_end(row[: lengths[place]], ends_of(self.model))
        return tokens


@dataclass
class GenerateBatch:
    """With its prefix cache on, which is its default."""

    model: PreTrainedModel
    name: str = "model.generate_batch"

    def run(self, prompts: Prompts, answers: Answers) -> Tokens:
        lengths = each(answers, prompts)
        config = copy.deepcopy(self.model.generation_config)
        config.update(max_new_tokens=max(lengths), eos_token_id=ends_of(self.model) or -1, pad_token_id=0)
        set_up = self._set_up(prompts, max(lengths))
        if min(lengths) == max(lengths):
            outputs = self.model.generate_batch(prompts, generation_config=config, continuous_batching_config=set_up)
            found = list(outputs.values())
        else:
            found = self._one_by_one(prompts, lengths, config, set_up)
        errors = {str(output.error) for output in found if output.error}
        if errors or len(found) != len(prompts):
            raise RuntimeError("; ".join(sorted(errors)) or f"{len(prompts) - len(found)} prompts are missing")
        return [list(output.generated_tokens) for output in found]

    def _one_by_one(self, prompts: Prompts, lengths: Sequence[int], config: GenerationConfig, set_up: Any) -> list[Any]:
        """What ``generate_batch`` does, with a limit for each prompt."""
        manager = self.model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=set_up, block=True, timeout=5
        )
        found: dict[str, Any] = {}
        with manager as running:
            names = [
                running.add_request(prompt, max_new_tokens=length)
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            while len(found) < len(names):
                result = running.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = result
                elif result is None and not running.is_running():
                    break
        return [found[name] for name in names if name in found]

    def _set_up(self, prompts: Prompts, new_tokens: int) -> ContinuousBatchingConfig | None:
        """None is its own choice. On a CPU that is to fill most of the memory with zeros, to warm up with 8,192 tokens,
        and to share no prefix of less than 256: there it gets what serves it better."""
        if self.model.device.type != "cpu":
            return None
        pages = sum(-(-(len(prompt) + new_tokens) // _PAGE) for prompt in prompts)
        names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        size = "page_size" if "page_size" in names else "block_size"  # the latter up to transformers 5.22
        return ContinuousBatchingConfig(num_blocks=pages + _SPARE_PAGES, max_batch_tokens=512, **{size: _PAGE})


def each(answers: Answers, prompts: Prompts) -> Sequence[int]:
    return [answers] * len(prompts) if isinstance(answers, int) else answers


def ends_of(model: PreTrainedModel) -> list[int]:
    """The tokens that end an answer; none, as a rule."""
    return list(model.generation_config.eos_token_id or [])


def _up_to_the_end(row: list[int], ends: list[int]) -> list[int]:
    known = set(ends)
    return next((row[: place + 1] for place, token in enumerate(row) if token in known), row)


def settled(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tidied(device: torch.device) -> None:
    """Nothing of an earlier run is left in memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    settled(device)


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    tidied(device)
    began = time.perf_counter()
    value = work()
    settled(device)
    return time.perf_counter() - began, value


def best_batch_size(
    model: PreTrainedModel, prompts: Prompts, answers: Answers, sizes: list[int]
) -> tuple[int, dict[int, float]]:
    """The batch size at which ``generate`` is fastest, from one batch of each; and prompts/s for those tried.

    On a GPU the first run of a size is slow, whatever the size: there it runs over a few tokens first.
    Where answers differ in length a prompt counts by its share of the tokens, and no size is skipped: the batches hold
    different work.
    """
    lengths = each(answers, prompts)
    mean, even = sum(lengths) / len(lengths), min(lengths) == max(lengths)
    speeds: dict[int, float] = {}
    for size in sorted({min(size, len(prompts)) for size in sizes}):
        batch = Generate(model, size)
        try:
            if model.device.type == "cuda":
                batch.run(prompts[:size], [min(2, length) for length in lengths[:size]])
            seconds, _ = timed(model.device, lambda size=size, batch=batch: batch.run(prompts[:size], lengths[:size]))
        except Exception:  # mostly for want of memory, of which larger ones need more
            break
        speeds[size] = sum(lengths[:size]) / mean / seconds
        if even and speeds[size] * _SLOWER < max(speeds.values()):
            break
    if not speeds:
        return min(sizes), {}  # to fail once more where it is reported
    return max(speeds, key=speeds.__getitem__), speeds
