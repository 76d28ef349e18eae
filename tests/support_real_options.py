"""Values of each option of ``generate`` that make a difference to what Gemma 3 270M says of two prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_oracle import reference
from support_real_model import load_once
from transformers import (
    LogitsProcessor,
    StopStringCriteria,
    WatermarkingConfig,
)
from transformers.generation import StoppingCriteria

from hf_batchllm import BatchGenerator

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
