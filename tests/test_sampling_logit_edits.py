"""Options that change single logits, where the device picks tokens: those of ``generate``, one prompt at a time."""

from __future__ import annotations

import copy
import functools
import random
import warnings
from typing import Any

import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on
from support_families import random_prompts, reference_generate
from support_parity import pages_of_memory
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator
from hf_batchllm.sampling.host_sampler import HostSampler

# With repetitions inside and between them, and one of a single token.
PROMPTS = [*random_prompts(random.Random(5), 97, "mixed", 12)[:6], [5, 6, 7, 5, 6, 7, 5, 6], [11], [3, 3, 3]]
ENDS = {"eos_token_id": [4, 60, 61], "pad_token_id": 0}
WORDS = [[8], [5, 6, 7], [3, 3], [60, 2], [61]]
EDITS: list[dict[str, Any]] = [
    {"suppress_tokens": [1, 2, 3, 40, 500]},
    {"begin_suppress_tokens": [5, 9, *range(10, 90, 2)]},
    {"bad_words_ids": [*WORDS, *([first, (3 * first + more) % 97] for first in range(1, 97) for more in range(2))]},
    {
        "sequence_bias": [
            [[7], 2.5], [[9], -1.0], [[6, 7], -9.0], [[5, 6, 7], 4.0], [[3, 3], 1.5], [[12, 9], 2.0],
            *([[first, (7 * first) % 97], 3.0] for first in range(1, 97)),
        ]
    },
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 1},
    {"encoder_repetition_penalty": 1.6},
    {"encoder_repetition_penalty": 0.6, "repetition_penalty": 1.3, "sequence_bias": [[[7], 2.5], [[11], 2.5]]},
    {"forced_eos_token_id": [4, 61], "forced_bos_token_id": 22, "suppress_tokens": [4]},
    {"exponential_decay_length_penalty": (3, 1.3)},
    {"renormalize_logits": True, "suppress_tokens": [5]},
    {"min_new_tokens": 4, "bad_words_ids": WORDS, "no_repeat_ngram_size": 2, "suppress_tokens": [30]},
]  # fmt: skip


@pytest.fixture(autouse=True)
def by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Any, *given: Any) -> Any:
        raise AssertionError("the host picks tokens")

    monkeypatch.setattr(HostSampler, "without_waiting", never)


def brief(options: dict[str, Any]) -> str:
    return " ".join(options)


@pytest.mark.some_cases
@pytest.mark.parametrize("options", EDITS, ids=brief)
def test_tokens_are_those_of_generate(options: dict[str, Any], device: str) -> None:
    model = model_on(device, "llama")
    given = {"max_new_tokens": 9, **ENDS, **options}
    alone = [reference_generate(model, prompt, **given) for prompt in PROMPTS]
    for config in ({}, {"steps_per_sync": 7, "kv_memory": pages_of_memory(model, 24, 8), "page_size": 8}):
        with BatchGenerator(model, **config) as generator:
            result = generator.generate(PROMPTS, progress=False, **given)
        assert result.token_ids == alone
    assert alone != _without(device) or options.get("renormalize_logits")


@functools.cache
def _without(device: str) -> list[list[int]]:
    model = model_on(device, "llama")
    return [reference_generate(model, prompt, max_new_tokens=9, **ENDS) for prompt in PROMPTS]


def test_each_prompt_its_own(device: str) -> None:
    """In one call, plain prompts among them."""
    model = model_on(device, "gemma2")
    each = [{"max_new_tokens": 6 + place, **ENDS, **EDITS[place]} for place in range(len(EDITS))]
    each.append({"max_new_tokens": 9, **ENDS})
    prompts = [PROMPTS[place % len(PROMPTS)] for place in range(len(each))]
    configs = [GenerationConfig(do_sample=False, **options) for options in each]
    with BatchGenerator(model, steps_per_sync=4) as generator:
        result = generator.generate(prompts, configs, progress=False)
    for prompt, options, row in zip(prompts, each, result, strict=True):
        assert row.token_ids == reference_generate(model, prompt, **options)


@pytest.mark.some_cases
@pytest.mark.parametrize("number", [2, 3, 5, 9, 10, 11])
def test_samples_are_those_that_the_host_would_draw(number: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "max_new_tokens": 9, **ENDS, **EDITS[number], "do_sample": True, "temperature": 1.3, "top_p": 0.9, "seed": 6,
        "num_return_sequences": 2, "progress": False,
    }  # fmt: skip
    with BatchGenerator(model_on(device, "llama")) as generator:
        ours = generator.generate(PROMPTS, **given)
        monkeypatch.undo()
        if device == "cpu":
            from support_device_loop import run_over_references

            run_over_references(monkeypatch)
        theirs = generator.generate(PROMPTS, logits_processor=[lambda ids, scores: scores], **given)
    same = sum(mine.token_ids == its.token_ids for mine, its in zip(ours, theirs, strict=True))
    assert same >= 0.95 * len(ours)  # a token at the edge of a nucleus may fall on either side


def test_logits_that_are_no_numbers_are_repaired(device: str) -> None:
    """NaN counts as 0, and infinity as the largest number: a prompt beside may have them stay as they are."""
    model = copy.deepcopy(model_on(device, "llama"))
    given = {"max_new_tokens": 9, **ENDS, "remove_invalid_values": True, "suppress_tokens": [9]}

    def spoil(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([7, 30], device=logits.device), torch.nan).index_fill(
            -1, torch.tensor([9], device=logits.device), torch.inf
        )

    model.lm_head.register_forward_hook(spoil)
    alone = [reference_generate(model, prompt, **given) for prompt in PROMPTS]
    each = [{**given, "remove_invalid_values": place % 3 > 0} for place in range(len(PROMPTS))]
    configs = [GenerationConfig(do_sample=False, **options) for options in each]
    with BatchGenerator(model, steps_per_sync=4) as generator, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is a hook
        assert generator.generate(PROMPTS, progress=False, **given).token_ids == alone
        found = generator.generate(PROMPTS, configs, progress=False).token_ids
    assert [found[place] == alone[place] for place in range(len(PROMPTS)) if place % 3] == [True] * 6


def test_in_a_tensor_and_with_log_probabilities(device: str) -> None:
    model = model_on(device, "llama")
    ids = torch.tensor([[5, 6, 7, 5, 6], [9, 9, 8, 9, 9]], device=device)
    given = {"max_new_tokens": 8, "no_repeat_ngram_size": 2, "suppress_tokens": [4], "do_sample": False, **ENDS}
    with BatchGenerator(model) as generator:
        assert torch.equal(generator.generate(ids, **given), model.generate(ids, **given))
        rows = generator.generate(ids.tolist(), logprobs=1, progress=False, **given)
    assert all(len(row.logprobs) == len(row.token_ids) for row in rows)
