"""Who takes part: this library, ``model.generate`` at its best batch size, ``model.generate_batch``."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from ..call import scheduler_for
from ..generator import BatchGenerator
from ..request import Request, Step
from ..results import RunReport
from ..scheduler import Scheduler

Prompts = list[list[int]]
Tokens = list[list[int]]
_PAGE, _SPARE_PAGES = 64, 64
_SLOWER = 1.02  # by so much a batch size must be slower than the best before larger ones are not tried


@dataclass(frozen=True)
class StepSize:
    """How large a step of the engine was."""

    rows: int  # decode rows
    chunk_tokens: int  # of prompts
    samples: int  # rows that went through the LM head


class RecordingScheduler:
    """Keeps a record of the steps that another scheduler makes."""

    def __init__(self, inner: Scheduler) -> None:
        self.inner = inner
        self.sizes: list[StepSize] = []

    def start(self, *args: Any) -> None:
        self.sizes = []
        self.inner.start(*args)

    def next(self) -> Step | None:
        step = self.inner.next()
        if step is not None:
            self.sizes.append(StepSize(len(step.rows), step.tokens - len(step.rows), len(step.sampling())))
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

    def run(self, prompts: Prompts, new_tokens: int) -> Tokens:
        # What a user of one call would pay: the generator is made anew. No tokenizer is looked for.
        result = BatchGenerator(self.model, NoTokenizer(), **self.fields).generate(
            prompts, max_new_tokens=new_tokens, progress=False
        )
        self.report = result.report
        return result.token_ids


class NoTokenizer:
    """Prompts are token ids here, and nobody reads the text."""

    def __call__(self, texts: list[str]) -> dict[str, Tokens]:
        raise NotImplementedError

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return ""


@dataclass
class Generate:
    model: PreTrainedModel
    batch_size: int
    name: str = "model.generate"

    def run(self, prompts: Prompts, new_tokens: int) -> Tokens:
        tokens: Tokens = []
        for begin in range(0, len(prompts), self.batch_size):
            rows = prompts[begin : begin + self.batch_size]
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self.model.device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.model.device)
            out = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens)
            tokens += out[:, width:].tolist()
        return tokens


@dataclass
class GenerateBatch:
    """With its prefix cache on, which is its default."""

    model: PreTrainedModel
    name: str = "model.generate_batch"

    def run(self, prompts: Prompts, new_tokens: int) -> Tokens:
        config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = self.model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=self._set_up(prompts, new_tokens)
        )
        tokens = [list(outputs[key].generated_tokens) for key in outputs]
        errors = {str(outputs[key].error) for key in outputs if outputs[key].error}
        if errors or len(tokens) != len(prompts):
            raise RuntimeError("; ".join(sorted(errors)) or f"{len(prompts) - len(tokens)} prompts are missing")
        return tokens

    def _set_up(self, prompts: Prompts, new_tokens: int) -> ContinuousBatchingConfig | None:
        """None is its own choice. On a CPU that is to fill most of the memory with zeros, to warm up with 8,192 tokens,
        and to share no prefix of less than 256: there it gets what serves it better."""
        if self.model.device.type != "cpu":
            return None
        pages = sum(-(-(len(prompt) + new_tokens) // _PAGE) for prompt in prompts)
        names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        size = "page_size" if "page_size" in names else "block_size"  # the latter up to transformers 5.22
        return ContinuousBatchingConfig(num_blocks=pages + _SPARE_PAGES, max_batch_tokens=512, **{size: _PAGE})


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    value = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began, value


def best_batch_size(
    model: PreTrainedModel, prompts: Prompts, new_tokens: int, sizes: list[int]
) -> tuple[int, dict[int, float]]:
    """The batch size at which ``generate`` is fastest, from one batch of each; and prompts/s for those tried."""
    speeds: dict[int, float] = {}
    for size in sorted({min(size, len(prompts)) for size in sizes}):
        try:
            seconds, _ = timed(model.device, lambda size=size: Generate(model, size).run(prompts[:size], new_tokens))
        except torch.cuda.OutOfMemoryError:
            break
        speeds[size] = size / seconds
        if speeds[size] * _SLOWER < max(speeds.values()):
            break
    if not speeds:
        raise RuntimeError("model.generate does not fit into memory at any of the batch sizes")
    return max(speeds, key=speeds.__getitem__), speeds
