"""Tensors for ``generate``, and what it gives for them: also of every step, along given tokens."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from support_families import build

PAD = 0
WIDTH = 20
# Some versions of transformers penalise padding as if it had been said: then nothing may hang on that token.
PENALTY = {"repetition_penalty": 2.0, "suppress_tokens": [PAD]}
BOTH = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "pad_token_id": PAD}


def batch(
    side: str = "left", rows: int = 6, width: int = WIDTH, seed: int = 1, least: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [rows, width] of rows of all lengths that begin alike; one of them fills the width."""
    rng = random.Random(seed)
    start = [rng.randrange(4, 97) for _ in range(width)]
    ids, mask = torch.full((rows, width), PAD), torch.zeros(rows, width, dtype=torch.long)
    for row in range(rows):
        length = width if row == 2 else rng.randint(least, width)
        shared = rng.randint(0, length)
        tokens = start[:shared] + [rng.randrange(4, 97) for _ in range(length - shared)]
        left = {"left": width - length, "right": 0, "both": (width - length) // 2}[side]
        ids[row, left : left + length] = torch.tensor(tokens)
        mask[row, left : left + length] = 1
    return ids, mask


def stock(ids: torch.Tensor, family: str = "llama", **options: Any) -> Any:
    """What ``generate`` gives."""
    model: Any = build(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about lengths; ours are held against what comes out
        return model.generate(ids, **options)


@contextmanager
def drawing(tokens: torch.Tensor) -> Iterator[None]:
    """Where ``generate`` draws, it draws these: [rows, steps]."""
    steps = iter(tokens.T)
    drawn = torch.multinomial
    torch.multinomial = lambda weights, num_samples: next(steps)[:, None]  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.multinomial = drawn  # type: ignore[assignment]
