"""Calls of a BatchGenerator beside ``model.generate``, for a model whose owner changed something."""

from __future__ import annotations

from typing import Any

import torch

from hf_batchllm import BatchGenerator

PROMPTS = [list(range(3, 33)), [*range(3, 20), 50, 51], [7, 8, 9]]
NEW_TOKENS = 6
GREEDY: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


def tokens(generator: BatchGenerator) -> list[list[int]]:
    return [each.token_ids for each in generator.generate(PROMPTS, **GREEDY)]


def tokens_alone(model: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **GREEDY)
        found.append(out[0, len(prompt) :].tolist())
    return found
