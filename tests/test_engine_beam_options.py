"""Beam search with other options: processors, criteria, allowed tokens, stop strings; and what does not go with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_beam_cases import FAMILY, OPTIONS, PROMPTS, Case, assert_as_generate, check, expected
from support_calls import answers
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on
from support_families import build
from support_letter_tokenizers import letter_tokenizer
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    TextStreamer,
    WatermarkingConfig,
)

from hf_batchllm import BatchGenerator, UnsupportedOptionError


def only(sequences: list[list[int]]) -> Callable[[int, torch.Tensor], list[int]]:
    """Allows so few tokens that most beams have nothing to go on with."""

    def allowed(index: int, ids: torch.Tensor) -> list[int]:
        new = ids.tolist()[len(PROMPTS[4]) :]
        fitting = (each for each in sequences if each[: len(new)] == new and len(each) > len(new))
        return sorted({each[len(new)] for each in fitting}) or [0]

    return allowed


@pytest.mark.parametrize("sequences", [[[5, 6, 7, 0]], [[5, 6, 0], [5, 7, 0]], [[5, 0], [6, 7, 8, 0], [9, 9, 9, 9, 0]]])
@pytest.mark.parametrize("samples", [1, 4])
def test_few_tokens_are_allowed(sequences: list[list[int]], samples: int) -> None:
    """There are fewer ways than beams, and transformers fills up with equals: they are the same ones here."""
    options = {"prefix_allowed_tokens_fn": only(sequences), "eos_token_id": 0, "pad_token_id": 1}
    check([PROMPTS[4]], num_return_sequences=samples, **options)


class Remembers(LogitsProcessor):
    """It counts its calls, and sees which row it is in."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[:, 3 * self.calls] += 2.0
        scores[1:, 7] += 1.0
        return scores


def test_processors_see_all_beams_of_a_prompt_as_in_generate() -> None:
    made: list[int] = []

    def factory(index: int, ids: list[int]) -> list[LogitsProcessor]:
        made.append(index)
        return [Remembers()]

    result = answers(FAMILY, PROMPTS, logits_processor=factory, **OPTIONS)
    assert sorted(made) == list(range(len(PROMPTS)))
    for index, prompt in enumerate(PROMPTS):
        out = expected(build(FAMILY), prompt, logits_processor=[Remembers()], **OPTIONS)
        rows = out.sequences[:, len(prompt) :].tolist()
        assert rows == [each.token_ids for each in result if each.index == index]


class Fifth(StoppingCriteria):
    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        assert scores is None or scores[-1].shape[0] == OPTIONS["num_beams"]
        return ids[:, -1] % 5 == 0


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {"stopping_criteria": [Fifth()], "num_return_sequences": 4},
        {"stopping_criteria": [Fifth()], "eos_token_id": [3, 51], "pad_token_id": 1, "early_stopping": True},
        {"watermarking_config": WatermarkingConfig()},
        {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])},
        {"guidance_scale": 1.5},
        {"forced_bos_token_id": 4},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.filterwarnings("ignore:.guidance_scale.")
def test_options_that_look_at_more_than_a_row(options: dict[str, Any]) -> None:
    check(**options)


class SlowFifth(Fifth):
    """Its answer is ready some milliseconds after it was given."""

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if ids.is_cuda:
            torch.cuda._sleep(20_000_000)
        return super().__call__(ids, scores)


def test_criteria_on_a_gpu_are_waited_for(device: str) -> None:
    model, options = model_on(device, FAMILY), OPTIONS | {"stopping_criteria": [SlowFifth()]}
    found = answers(model, PROMPTS, **options)
    alone = answers(FAMILY, PROMPTS, **OPTIONS, stopping_criteria=[Fifth()])
    assert found.token_ids == alone.token_ids


def test_strings_end_beams() -> None:
    tokenizer, model = letter_tokenizer(), build(FAMILY)
    first = answers(model, PROMPTS, **OPTIONS)
    strings = [tokenizer.decode(each.token_ids[2:4]) for each in first]
    options = OPTIONS | {"stop_strings": strings}
    result = BatchGenerator(model, tokenizer).generate(PROMPTS, **options)
    assert any(each.finish_reason == "stop" for each in result)
    assert_as_generate(Case(FAMILY, PROMPTS, options | {"tokenizer": tokenizer}), model, result)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"streamer": TextStreamer(None)}, "streamer"),
        ({"guidance_scale": 1.5, "negative_prompt_ids": torch.ones(6, 2, dtype=torch.long)}, "negative_prompt_ids"),
    ],
)
def test_what_does_not_go_with_beams_is_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=f"`{name}` does not go with `num_beams`"):
        answers(FAMILY, PROMPTS, **OPTIONS, **options)


def test_beams_beside_none_are_refused() -> None:
    configs = [GenerationConfig(num_beams=2), GenerationConfig()]
    with pytest.raises(UnsupportedOptionError, match="`num_beams` is 1 for some prompts and more for others"):
        answers(FAMILY, PROMPTS[:2], generation_config=configs, max_new_tokens=2)


def test_a_scheduler_of_ones_own_has_no_say() -> None:
    with pytest.warns(UserWarning, match="`scheduler` has no effect on a beam search"):
        answers(FAMILY, PROMPTS[:1], {"scheduler": "fifo"}, num_beams=2, max_new_tokens=2)
