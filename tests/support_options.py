"""Values of each option of ``generate`` that make a difference."""

from __future__ import annotations

import random
from typing import Any

import torch
from support_families import random_prompts
from support_letter_tokenizers import letter_tokenizer
from transformers import (
    LogitsProcessor,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import StoppingCriteria

VOCABULARY = 101

SEED = 11


class Lift(LogitsProcessor):
    """Looks back: whatever was two tokens ago becomes likelier."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < 2:
            return scores
        return scores.scatter_add(1, input_ids[:, -2:-1], torch.full_like(input_ids[:, :1], 2, dtype=scores.dtype))


class Multiple(StoppingCriteria):
    """The sum of all ids is a multiple of seven."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.sum(dim=1) % 7 == 0


def even_after_odd(batch_id: int, ids: torch.Tensor) -> list[int]:
    return list(range(int(ids[-1]) % 2, VOCABULARY, 2))


# Values of each option that make a difference in a vocabulary of 101.
ANY: dict[str, list[Any]] = {
    "min_new_tokens": [3, 9],
    "min_length": [12],
    "eos_token_id": [3, [5, 17, 40, 41, 42, 43, 44]],
    "repetition_penalty": [1.4, 0.8],
    "encoder_repetition_penalty": [1.3],
    "no_repeat_ngram_size": [1, 2],
    "encoder_no_repeat_ngram_size": [1, 2],
    "bad_words_ids": [[[5], [7, 8], [20]], [[number] for number in range(30, 60)]],
    "sequence_bias": [{(7,): 3.0, (8, 9): -5.0}, [[[11], 4.0]]],
    "forced_bos_token_id": [7],
    "forced_eos_token_id": [9],  # of several, the scores are equal
    "exponential_decay_length_penalty": [(2, 1.4)],
    "suppress_tokens": [list(range(0, 90, 2))],
    "begin_suppress_tokens": [list(range(50))],
    "renormalize_logits": [True],
    "remove_invalid_values": [True],
    "guidance_scale": [1.7],
    "watermarking_config": [
        WatermarkingConfig(bias=2.5),
        WatermarkingConfig(bias=3.0, context_width=2, seeding_scheme="selfhash"),
        SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3),
    ],
    "stop_strings": ["e", ["bc", "ffa", "aed", "dd"]],
    "logits_processor": [[Lift()]],
    "stopping_criteria": [[Multiple()]],
    "prefix_allowed_tokens_fn": [even_after_odd],
    "max_time": [10_000.0],
}

DRAWN: dict[str, list[Any]] = {
    "temperature": [0.4, 1.0, 1.8],
    "top_k": [1, 4, 40],
    "top_p": [0.3, 0.9],
    "min_p": [0.05, 0.3],
    "top_h": [0.4, 0.9],
    "typical_p": [0.4, 0.9],
    "epsilon_cutoff": [0.02],
    "eta_cutoff": [0.02],
}

WITH: dict[str, dict[str, Any]] = {"exponential_decay_length_penalty": {"eos_token_id": 5}}  # what it cannot do without


def _prompts(seed: int, count: int = 4) -> list[list[int]]:
    return random_prompts(random.Random(seed), VOCABULARY, "mixed", count)[:count]


def _tokens(options: dict[str, Any]) -> dict[str, Any]:
    return {"tokenizer": letter_tokenizer()} if "stop_strings" in options else {}
