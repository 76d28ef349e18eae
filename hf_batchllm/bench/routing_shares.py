"""Which experts the tokens of a run meet: counted in a pass of some of its prompts and answers through the model.

The model's own code runs, without an engine, one sequence at a time. What its routers choose is read off the calls of
its experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from .matrices import Mixture

# Sequences and tokens, both at most. Answers of one sequence resemble each other, so many short ones say most.
_MOST_SEQUENCES = 128
_MOST_TOKENS = {"cuda": 1 << 17}
_MOST_TOKENS_ELSEWHERE = 1 << 13


@torch.no_grad()
def with_measured_shares(
    model: PreTrainedModel,
    mixtures: Sequence[tuple[nn.Module, Mixture]],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> tuple[list[Mixture], int]:
    """The mixtures with the shares of their experts, and the number of tokens that were counted.

    Tokens of answers count, as it is decode steps in which few rows meet few experts; those of prompts where no answer
    has a second token.
    """
    device = model.device
    counts = [torch.zeros(mixture.experts, dtype=torch.int64, device=device) for _, mixture in mixtures]
    seen = [0] * len(mixtures)
    from_token = 0  # of the sequence that runs

    def count(nth: int, module: nn.Module, given: tuple[Any, ...]) -> None:
        indices = given[1][from_token:]  # [tokens, top]
        counts[nth] += torch.bincount(indices.flatten().long(), minlength=len(counts[nth]))[: len(counts[nth])]
        seen[nth] += len(indices)

    hooks = [
        module.register_forward_pre_hook(partial(count, nth)) for nth, (module, _) in enumerate(mixtures)
    ]  # fmt: skip
    try:
        for prompt, answer in _some(prompts, answers, _MOST_TOKENS.get(device.type, _MOST_TOKENS_ELSEWHERE)):
            read = answer[:-1]  # the last token is never read
            from_token = len(prompt) if read else 0
            ids = torch.tensor([[*prompt, *read]], device=device)
            model.get_decoder()(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not all(seen):
        return [mixture for _, mixture in mixtures], 0
    measured = [
        mixture.with_counts(found.cpu().numpy(), tokens)
        for (_, mixture), found, tokens in zip(mixtures, counts, seen, strict=True)
    ]
    return measured, min(seen)


def _some(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], most: int
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """From all over the list, as many as fit."""
    pairs = list(zip(prompts, answers, strict=True))
    places = np.linspace(0, len(pairs) - 1, min(len(pairs), _MOST_SEQUENCES)).astype(int)
    some: list[tuple[Sequence[int], Sequence[int]]] = []
    for place in np.random.default_rng(0).permutation(places):
        most -= sum(map(len, pairs[place]))
        if some and most < 0:
            break
        some.append(pairs[place])
    return some
