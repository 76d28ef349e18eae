"""The contenders: this library, ``model.generate`` at its best batch size, and ``model.generate_batch``.

Each gets the prompts and the length of each answer. EOS is ignored, so every contender makes the same number of tokens
for the same prompt.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from ..engine.wiring import scheduler_for
from ..generator import BatchGenerator
from ..results.run_report import RunReport
from .batch_sizes import fastest_batch_size
from .recording_scheduler import RecordingScheduler
from .timing import timed

Prompts = list[list[int]]
Tokens = list[list[int]]
Answers = int | Sequence[int]  # new tokens: one number for all prompts, or one for each
_PAGE, _SPARE_PAGES = 64, 64  # tokens; pages of generate_batch's cache on a CPU
_SLOWER = 1.02  # larger batch sizes are not tried once one is slower than the best by this factor


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
        lengths = length_of_each(answers, prompts)
        self.scheduler.answers = lengths if min(lengths) < max(lengths) else None
        # A new generator each time, as a user who makes one call would pay. No tokenizer is looked for.
        result = BatchGenerator(self.model, NoTokenizer(), **self.fields).generate(
            prompts, max_new_tokens=max(lengths), progress=False
        )
        self.report = result.report
        return result.token_ids


class NoTokenizer:
    """In the tokenizer's place: prompts are token ids here, and the text is not read."""

    def __call__(self, texts: list[str]) -> dict[str, Tokens]:
        raise NotImplementedError("the prompts of a benchmark are token ids")

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return ""


@dataclass
class Generate:
    """``model.generate`` in batches of prompts sorted by length, which serves it best.

    A batch is as wide as its longest prompt, and runs as long as its longest answer takes.
    """

    model: PreTrainedModel
    batch_size: int
    name: str = "model.generate"

    def run(self, prompts: Prompts, answers: Answers) -> Tokens:
        lengths = length_of_each(answers, prompts)
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        tokens: Tokens = [[] for _ in prompts]
        for begin in range(0, len(order), self.batch_size):
            places = order[begin : begin + self.batch_size]
            rows = [prompts[place] for place in places]
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self.model.device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.model.device)
            longest = max(lengths[place] for place in places)
            generate: Any = self.model.generate
            out = generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest)
            for place, row in zip(places, out[:, width:].tolist(), strict=True):
                tokens[place] = _cut_at_end(row[: lengths[place]], end_tokens(self.model))
        return tokens


@dataclass
class GenerateBatch:
    """``model.generate_batch`` with its prefix cache on, which is its default."""

    model: PreTrainedModel
    name: str = "model.generate_batch"

    def run(self, prompts: Prompts, answers: Answers) -> Tokens:
        lengths = length_of_each(answers, prompts)
        config = copy.deepcopy(self.model.generation_config)
        config.update(max_new_tokens=max(lengths), eos_token_id=end_tokens(self.model) or -1, pad_token_id=0)
        batching = self._batching_config(prompts, max(lengths))
        if min(lengths) == max(lengths):
            generate_batch: Any = self.model.generate_batch
            outputs = generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
            found = list(outputs.values())
        else:
            found = self._with_limits(prompts, lengths, config, batching)
        errors = {str(output.error) for output in found if output.error}
        if errors or len(found) != len(prompts):
            raise RuntimeError("; ".join(sorted(errors)) or f"{len(prompts) - len(found)} prompts are missing")
        return [list(output.generated_tokens) for output in found]

    def _with_limits(
        self,
        prompts: Prompts,
        lengths: Sequence[int],
        config: GenerationConfig,
        batching: ContinuousBatchingConfig | None,
    ) -> list[Any]:
        """What ``generate_batch`` does, with a limit of its own for each prompt."""
        make_manager: Any = self.model.continuous_batching_context_manager
        manager = make_manager(generation_config=config, continuous_batching_config=batching, block=True, timeout=5)
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

    def _batching_config(self, prompts: Prompts, new_tokens: int) -> ContinuousBatchingConfig | None:
        """None on a GPU: its own choice. On a CPU, a config that serves it better.

        Its own choice on a CPU is to fill most of the memory with zeros, to warm up with 8,192 tokens, and to share no
        prefix of less than 256.
        """
        if self.model.device.type != "cpu":
            return None
        pages = sum(-(-(len(prompt) + new_tokens) // _PAGE) for prompt in prompts)
        names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        size = "page_size" if "page_size" in names else "block_size"  # the latter up to transformers 5.22
        page_size: dict[str, Any] = {size: _PAGE}
        return ContinuousBatchingConfig(num_blocks=pages + _SPARE_PAGES, max_batch_tokens=512, **page_size)


def length_of_each(answers: Answers, prompts: Prompts) -> Sequence[int]:
    return [answers] * len(prompts) if isinstance(answers, int) else answers


def end_tokens(model: PreTrainedModel) -> list[int]:
    """The tokens that end an answer: none, unless --stop-after is given."""
    return list(model.generation_config.eos_token_id or [])


def _cut_at_end(row: list[int], ends: list[int]) -> list[int]:
    known = set(ends)
    return next((row[: place + 1] for place, token in enumerate(row) if token in known), row)


def best_batch_size(
    model: PreTrainedModel, prompts: Prompts, answers: Answers, sizes: list[int]
) -> tuple[int, dict[int, float]]:
    """The batch size at which ``generate`` is fastest, from one batch of each; and the prompts/s of each size tried.

    On a GPU the first run of a size is always slow: there it runs over a few tokens first.
    If answers differ in length, a prompt counts by its share of the tokens, and every size is tried: the batches hold
    different work.
    """
    lengths = length_of_each(answers, prompts)
    mean, equal = sum(lengths) / len(lengths), min(lengths) == max(lengths)

    def speed_of(size: int) -> float:
        batch = Generate(model, size)
        if model.device.type == "cuda":
            batch.run(prompts[:size], [min(2, length) for length in lengths[:size]])
        seconds, _ = timed(model.device, lambda: batch.run(prompts[:size], lengths[:size]))
        return sum(lengths[:size]) / mean / seconds

    try:
        return fastest_batch_size("model.generate", sizes, len(prompts), speed_of, slower=_SLOWER if equal else None)
    except Exception:
        return min(sizes), {}  # it fails again in the runs, which report it
