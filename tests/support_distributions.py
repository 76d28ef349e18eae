"""What tests of sampling have in common: what transformers would draw from, and whether it was drawn from.

Seeds are fixed, so nothing is left to chance; a statistic may be as far out as once in a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList

from hf_batchllm.inputs.seeds import as_int64
from hf_batchllm.kernels.reference.sample_torch import SAMPLE_BLOCK, exponential

SIDES = 3.09  # standard deviations: once in a thousand on each side


def brief(options: Any) -> str:
    """For the names of tests."""
    return str({name: value for name, value in options.items() if name != "eos_token_id"}) or "defaults"


def processors_of(model: Any, prompt_tokens: int, **options: Any) -> LogitsProcessorList:
    """Those that ``generate`` would use for a prompt of this length, prepared as it does."""
    config, _ = model._prepare_generation_config(None, **({"do_sample": True} | options))
    if config.min_new_tokens is not None:
        config.min_length = prompt_tokens + config.min_new_tokens
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device="cpu")
    return model._get_logits_processor(config, input_ids_seq_length=prompt_tokens, device="cpu", model_kwargs={})


def expected_token(scores: torch.Tensor, seed: int, index: int, sample: int, position: int) -> int:
    """By the book: the best block of the vocabulary after its noise, and the best of its tokens after theirs."""
    key = [torch.tensor([each]) for each in (as_int64(seed), index, sample, position)]
    blocks = scores.double().split(SAMPLE_BLOCK)
    weights, begin = torch.stack([each.logsumexp(0) for each in blocks]), torch.arange(len(blocks)) * SAMPLE_BLOCK
    best = int((weights - exponential(begin, *key, second=True).log()).argmax())
    token = begin[best] + torch.arange(len(blocks[best]))
    return int(token[(blocks[best] - exponential(token, *key).log()).argmax()])


def critical_value(freedom: int, sides: float) -> float:
    """Of chi-square, after Wilson and Hilferty."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + sides * spread**0.5) ** 3


def assert_drawn_from(expected: np.ndarray, drawn: Sequence[int]) -> None:
    """Chi-square on both sides: too far from the distribution is wrong, and so is too close to it."""
    counts = np.bincount(drawn, minlength=len(expected))
    assert not counts[expected == 0].any(), "a token without probability was drawn"
    order = np.argsort(expected)
    expected, counts = expected[order] * len(drawn), counts[order]
    bins = np.cumsum(expected) // 8  # the rare ones together, eight to a bin
    wanted = np.bincount(bins.astype(int), expected)
    found = np.bincount(bins.astype(int), counts)[wanted > 5]
    wanted = wanted[wanted > 5]
    found, wanted = np.append(found, len(drawn) - found.sum()), np.append(wanted, len(drawn) - wanted.sum())
    found, wanted = found[wanted > 0.5], wanted[wanted > 0.5]
    freedom = len(wanted) - 1
    if freedom < 1:
        return
    statistic = ((found - wanted) ** 2 / wanted).sum()
    assert statistic < critical_value(freedom, SIDES), f"{statistic} with {freedom} degrees of freedom"
    assert freedom < 5 or statistic > critical_value(freedom, -SIDES)
