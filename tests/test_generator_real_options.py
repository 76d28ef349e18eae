"""Each option of ``generate`` on a real language model: every row is what ``generate`` makes of its prompt alone.

The values are made of what the model would say without them, so that each of them changes something.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_oracle import check_row, reference
from support_real_model import NEEDS_REAL_MODEL, load_once
from test_generator_option_combinations import DRAWN
from transformers import GenerationConfig, LogitsProcessor, StopStringCriteria, WatermarkingConfig
from transformers.generation import StoppingCriteria

from hf_batchllm import BatchGenerator, Generation

pytestmark = NEEDS_REAL_MODEL
NEW, SEED = 4, 3
PROMPTS = ["The capital of France is", "The capital of France, which lies on the river Seine, is called"]


class Real:
    def __init__(self) -> None:
        self.model, self.tokenizer = load_once()
        self.generator = BatchGenerator(self.model, self.tokenizer)
        self.prompts = [self.tokenizer(text).input_ids for text in PROMPTS]
        self.plain = [reference(self.model, prompt, {"max_new_tokens": NEW})[0] for prompt in self.prompts]
        self.said = sorted({token for tokens in self.plain for token in tokens})

    def stop(self, strings: str) -> StopStringCriteria:
        return StopStringCriteria(self.tokenizer, strings)


@pytest.fixture(scope="session")
def real() -> Real:
    return Real()


class Less(LogitsProcessor):
    """Whatever the prompt holds becomes less likely, and what is being said before it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter_add(1, input_ids, torch.full_like(input_ids, -2, dtype=scores.dtype))


class Even(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 2 == 0


GREEDY: dict[str, Any] = {
    "max_length": lambda real: len(real.prompts[1]) + 3,
    "min_new_tokens": lambda real: {"min_new_tokens": 3, "eos_token_id": real.said},
    "min_length": lambda real: {"min_length": len(real.prompts[0]) + 3, "eos_token_id": real.said},
    "eos_token_id": lambda real: [real.plain[0][1], real.plain[1][2]],
    "repetition_penalty": lambda real: 1.5,
    "encoder_repetition_penalty": lambda real: 1.5,
    "no_repeat_ngram_size": lambda real: 1,
    "encoder_no_repeat_ngram_size": lambda real: 1,
    "bad_words_ids": lambda real: [[real.plain[0][0]], real.plain[1][:2]],
    "sequence_bias": lambda real: {tuple(real.plain[0][:1]): -20.0, tuple(real.plain[1][:2]): -20.0},
    "forced_bos_token_id": lambda real: 506,
    "forced_eos_token_id": lambda real: 107,
    "exponential_decay_length_penalty": lambda real: {
        "exponential_decay_length_penalty": (1, 3.0),
        "eos_token_id": 107,
    },
    "suppress_tokens": lambda real: real.said,
    "begin_suppress_tokens": lambda real: real.said,
    "renormalize_logits": lambda real: True,
    "remove_invalid_values": lambda real: True,
    "guidance_scale": lambda real: 3.0,
    "negative_prompt_ids": lambda real: None,  # by itself, below
    "watermarking_config": lambda real: WatermarkingConfig(bias=6.0),
    "stop_strings": lambda real: real.tokenizer.decode(real.plain[0])[1:4],
    "logits_processor": lambda real: [Less()],
    "stopping_criteria": lambda real: [Even()],
    "prefix_allowed_tokens_fn": lambda real: lambda batch_id, ids: [1000, *real.said[::2]],
    "max_time": lambda real: 10_000.0,
}


ARGUMENTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")  # of a call, not of a config
CHANGES_NOTHING = ("renormalize_logits", "remove_invalid_values", "max_time")


def _options(name: str, real: Real) -> dict[str, Any]:
    if name in DRAWN:
        return {"max_new_tokens": NEW, "do_sample": True, name: DRAWN[name][-1]}
    value = GREEDY[name](real)
    options = value if isinstance(value, dict) and name in value else {name: value}
    return options if name == "max_length" else {"max_new_tokens": NEW, **options}


def _prompts(name: str, real: Real) -> list[list[int]]:
    """One of those there are, by turns: the second is longer. A BOS that is forced is for the second token."""
    return [[2]] if name == "forced_bos_token_id" else [real.prompts[name in SECOND]]


IN_A_CONFIG = [name for name in [*GREEDY, *DRAWN] if name not in (*ARGUMENTS, "negative_prompt_ids")]
# Of the second prompt, what an option is about comes in time.
SECOND = {"max_length", *IN_A_CONFIG[1::2]} - {"min_length", "stop_strings"}


@pytest.fixture(scope="session")
def together(real: Real) -> dict[str, Generation]:
    """All options that a config may hold, in one call: each prompt has a config of its own."""
    prompts = [prompt for name in IN_A_CONFIG for prompt in _prompts(name, real)]
    configs = [GenerationConfig(**_options(name, real)) for name in IN_A_CONFIG]
    result = real.generator.generate(prompts, configs, seed=SEED, progress=False)
    return dict(zip(IN_A_CONFIG, result, strict=True))


def _assert_as_alone(name: str, row: Generation, real: Real, options: dict[str, Any]) -> None:
    assert check_row(real.model, row, options, SEED)
    if name not in (*CHANGES_NOTHING, *DRAWN):
        assert row.token_ids not in real.plain  # else it has shown nothing


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IN_A_CONFIG)
def test_an_option(name: str, real: Real, together: dict[str, Generation]) -> None:
    options = _options(name, real)
    if name == "stop_strings":  # which ``generate`` would look for in all of the vocabulary once more
        options = {"max_new_tokens": NEW, "stopping_criteria": [real.stop(options.pop(name))]}
    _assert_as_alone(name, together[name], real, options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_option_of_a_call(name: str, real: Real) -> None:
    options = _options(name, real)
    (row,) = real.generator.generate(real.prompts[:1], progress=False, **options)
    _assert_as_alone(name, row, real, options)


@pytest.mark.filterwarnings("ignore")
def test_negative_prompts(real: Real) -> None:
    negative = torch.tensor([[2, 818, 506]])
    options = {"max_new_tokens": NEW, "guidance_scale": 2.0, "negative_prompt_ids": negative}
    (row,) = real.generator.generate(real.prompts[:1], progress=False, **options)
    assert check_row(real.model, row, options)
