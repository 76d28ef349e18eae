"""``score``: the log-probabilities of a plain forward, whatever was shared, cut or run twice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest
import torch
from families import build, family_params, random_prompts
from harness import counted_tokens, pages_of_memory, watched  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parity import tries

from hf_batchllm import BatchConfig, BatchGenerator
from hf_batchllm.scores import Score, ScoreResult

FAMILY = "llama"
KINDS_OF_ATTENTION = ["llama", "gemma3", "gpt_oss", "opt"]  # windows, sinks, learned positions

Ids = list[int]


def questions(seed: int = 1, count: int = 10) -> tuple[list[Ids], list[list[Ids]]]:
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


def generator(family: str = FAMILY, **config: Any) -> BatchGenerator:
    return BatchGenerator(build(family), **{"min_shared_tokens": 1, **config})


def score(contexts: Any, continuations: Any = None, family: str = FAMILY, **options: Any) -> ScoreResult:
    config = {field.name: options.pop(field.name) for field in fields(BatchConfig) if field.name in options}
    return generator(family, **config).score(contexts, continuations, **{"progress": False, **options})


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


def assert_score(family: str, one: Score, context: Ids, continuation: Ids) -> None:
    assert one.token_ids == continuation
    with torch.no_grad():
        logits = build(family)(torch.tensor([context + continuation])).logits[0].float()[len(context) - 1 : -1]
    targets = torch.tensor(continuation)
    logprobs = logits.log_softmax(dim=-1)[torch.arange(len(targets)), targets]
    assert one.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
    assert one.logprob == pytest.approx(sum(one.logprobs)) and type(one.logprob) is float
    two = logits.topk(2, dim=-1).values
    if (two[:, 0] - two[:, 1]).min() > 1e-3:
        assert one.is_greedy is bool((logits.argmax(dim=-1) == targets).all())


# -- as a plain forward gives them -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", family_params(KINDS_OF_ATTENTION))
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"share_prefixes": False},
        {"page_size": 3, "max_batch_tokens": 1},
        {"max_batch_tokens": 7},
        {"scheduler": "fifo", "max_batch_tokens": 16},
    ],
    ids=str,
)
@pytest.mark.usefixtures("watched")
def test_shared_or_not_and_cut_anywhere(family: str, config: dict[str, Any]) -> None:
    contexts, several = questions()
    assert_right(family, contexts, several, score(contexts, several, family, **config))
