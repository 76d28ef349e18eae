"""Calls of a BatchGenerator beside ``model.generate``, for a model whose user changed something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_batchllm import BatchGenerator, UnsupportedModelError

PROMPTS = [list(range(3, 33)), [*range(3, 20), 50, 51], [7, 8, 9]]
NEW_TOKENS = 6
GREEDY: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
Change = Callable[[Any], object]  # is given a model


def tokens(generator: BatchGenerator) -> list[list[int]]:
    return [each.token_ids for each in generator.generate(PROMPTS, **GREEDY)]


def tokens_alone(model: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **GREEDY)
        found.append(out[0, len(prompt) :].tolist())
    return found


def assert_refused(model: Any, generator: BatchGenerator, why: str, *calls: Callable[[], object]) -> None:
    """By a new generator, by one that has run the model before it was changed, and in these calls."""
    for call in (lambda: BatchGenerator(model), lambda: tokens(generator), *calls):
        with pytest.raises(UnsupportedModelError, match=why):
            call()


class Around(nn.Module):
    """A module of a user's around one of the model's."""

    def __init__(self, inner: nn.Module, function: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.before = function


class Before(Around):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden if self.before is None else self.before(hidden))


def before_mlp(function: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return around_mlp(lambda mlp: Before(mlp, function))


def around_mlp(kind: Callable[[nn.Module], nn.Module]) -> Change:
    return lambda model: setattr(model.model.layers[1], "mlp", kind(model.model.layers[1].mlp))


def around_rotary(kind: Callable[[nn.Module], nn.Module]) -> Change:
    return lambda model: setattr(model.model, "rotary_emb", kind(model.model.rotary_emb))


def of_class(kind: type, pick: Callable[[Any], Any] = lambda model: model) -> Change:
    return lambda model: setattr(pick(model), "__class__", kind)
