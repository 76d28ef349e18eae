"""Contexts and continuations to score, and what one plain forward says of each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from support_families import build, random_prompts
from support_parity import counted_tokens, pages_of_memory, tries, watched  # noqa: F401

from hf_batchllm.results.scores import Score, ScoreResult

KINDS_OF_ATTENTION = ["llama", "gemma3", "gpt_oss", "opt"]  # windows, sinks, learned positions

Ids = list[int]


def questions(seed: int = 1, count: int = 7) -> tuple[list[Ids], list[list[Ids]]]:
    """Contexts that share, and continuations of one to some tokens: those of a context may share as well."""
    dice = random.Random(seed)
    contexts = random_prompts(dice, 97, "mixed", count)

    def tokens(count: int) -> Ids:
        return [dice.randrange(97) for _ in range(count)]

    several = []
    for place in range(len(contexts)):
        stem = tokens(place % 4)
        several.append([stem + tokens(dice.choice((1, 1, 2, 5))) for _ in range(1 + place % 5)])
    return contexts, several


def assert_right(family: str, contexts: Sequence[Ids], several: Sequence[Sequence[Ids]], result: ScoreResult) -> None:
    """Against one plain forward over each context with each of its continuations."""
    expected = [
        (index, choice, context, continuation)
        for index, (context, continuations) in enumerate(zip(contexts, several, strict=True))
        for choice, continuation in enumerate(continuations)
    ]
    assert len(result) == len(expected)
    for one, (index, choice, context, continuation) in zip(result, expected, strict=True):
        assert (one.index, one.choice, one.error) == (index, choice, None)
        assert_score(family, one, list(context), list(continuation))


@cache
def plain_logits(family: str, ids: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return build(family)(torch.tensor([ids])).logits[0].float()


def assert_score(family: str, one: Score, context: Ids, continuation: Ids) -> None:
    assert one.token_ids == continuation
    targets = torch.tensor(continuation)
    logits = plain_logits(family, tuple(context + continuation))[len(context) - 1 : -1]
    logprobs = logits.log_softmax(dim=-1)[torch.arange(len(targets)), targets]
    assert one.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
    assert one.logprob == pytest.approx(sum(one.logprobs)) and type(one.logprob) is float
    two = logits.topk(2, dim=-1).values
    if (two[:, 0] - two[:, 1]).min() > 1e-3:
        assert one.is_greedy is bool((logits.argmax(dim=-1) == targets).all())
