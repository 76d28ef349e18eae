"""What the tests of ``generate_batch`` and of its manager share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_batchllm import accelerated

PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [20], [5, 6, 7, 8, 9]]
METHODS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


def config(**fields: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": 6, "eos_token_id": 99, "do_sample": False, **fields})


def small(**fields: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(max_batch_tokens=64, num_blocks=8, **fields)


def alone(model: Any, ids: list[int], **options: Any) -> list[int]:
    """What ``generate`` gives for one prompt."""
    given = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 99, **options}
    made = model.generate(torch.tensor([ids]), pad_token_id=0, **given)
    return made[0, len(ids) :].tolist()


@contextmanager
def served(model: Any, **fields: Any) -> Iterator[None]:
    """Nothing may go to transformers' own methods."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="not accelerated")
        with accelerated(model, **fields):
            yield


@contextmanager
def said() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(each.message) for each in caught if "Warning: " not in str(each.message)]
