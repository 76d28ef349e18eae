"""Log-probabilities of a call's tokens, held against those of a plain forward over each sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from support_families import build, logits_of_rows

from hf_batchllm import BatchConfig, BatchGenerator, BatchResult, Generation

# What is said of the logits that a token was drawn from: by the row, and the tokens before it.
Scores = Callable[[Generation, torch.Tensor, torch.Tensor], torch.Tensor]


def assert_right(
    model: Any,
    result: Sequence[Generation],
    prompt_k: int | None = 2,
    k: int | None = 3,
    scores: Scores | None = None,
    near: float = 2e-4,
) -> None:
    """The chosen token and the ``k`` most likely have what the raw logits say, or ``scores``, if there are such."""
    rows = [(*row.prompt_token_ids, *row.token_ids) for row in result]
    for row, ids, logits in zip(result, rows, logits_of_rows(model, rows), strict=True):
        first, logits = len(row.prompt_token_ids), logits.float().cpu()
        if scores is not None:
            steps = range(first - 1, len(ids) - 1)
            drawn = [scores(row, torch.tensor([ids[: at + 1]]), logits[at][None]) for at in steps]
            logits = torch.cat([logits[: first - 1], *drawn, logits[-1:]])
        wanted = logits.log_softmax(dim=-1)
        for entries, begin, end, most in (
            (row.prompt_logprobs, 0, first, prompt_k),
            (row.logprobs, first, len(ids), k),
        ):
            assert (entries is None) == (most is None)
            if entries is None or most is None:
                continue
            assert len(entries) == end - begin
            for at, entry in enumerate(entries, begin):
                if at:
                    _assert_entry(entry, ids[at], wanted[at - 1], most, near)
                else:
                    assert entry is None, "nothing comes before the first token"


def _assert_entry(entry: Any, token: int, wanted: torch.Tensor, k: int, near: float) -> None:
    assert token in entry
    assert len(entry) in (k, k + 1) and (len(entry) == k or list(entry)[-1] == token)
    values = list(entry.values())
    assert values == sorted(values, reverse=True)
    assert all(type(other) is int and type(value) is float for other, value in entry.items())
    assert values == pytest.approx(wanted[list(entry)].tolist(), abs=near)
    assert values[:k] == pytest.approx(wanted.topk(k).values.tolist(), abs=near)


def generated(model: Any, prompts: Sequence[Any], new_tokens: int = 5, **options: Any) -> BatchResult:
    """``model``: or the name of a family. The options may be fields of a config, too."""
    model = build(model) if isinstance(model, str) else model
    config = {field.name: options.pop(field.name) for field in fields(BatchConfig) if field.name in options}
    given = {"logprobs": 3, "prompt_logprobs": 2, "max_new_tokens": new_tokens, "progress": False, **options}
    with BatchGenerator(model, **{"min_shared_tokens": 1, **config}) as generator:
        result: BatchResult = generator.generate(prompts, **given)
    return result


def right_result(family: str, prompts: Sequence[Any], new_tokens: int = 5, **options: Any) -> BatchResult:
    """What a call gives, once it has been seen to be right."""
    result = generated(family, prompts, new_tokens, **options)
    most = (options.get("prompt_logprobs", 2), options.get("logprobs", 3))
    ran = [row for row in result if row.error is None]
    assert_right(build(family), ran, *(each and min(each, 101) for each in most))
    return result
