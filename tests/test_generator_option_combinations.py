"""Options of ``generate``, alone and together: every row is what ``generate`` makes of its prompt by itself."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_families import build, random_prompts
from support_letter_tokenizers import letter_tokenizer
from support_oracle import check_row
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import StoppingCriteria

from hf_batchllm import BatchGenerator

FAMILIES = ("llama", "gemma3")
VOCABULARY = 101
SEED = 11


class Lift(LogitsProcessor):
    """Looks back: whatever was two tokens ago becomes likelier."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < 2:
            return scores
        return scores.scatter_add(1, input_ids[:, -2:-1], torch.full_like(input_ids[:, :1], 2, dtype=scores.dtype))


class Multiple(StoppingCriteria):
    """The sum of all ids is a multiple of seven."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.sum(dim=1) % 7 == 0


def even_after_odd(batch_id: int, ids: torch.Tensor) -> list[int]:
    return list(range(int(ids[-1]) % 2, VOCABULARY, 2))


# Values of each option that make a difference in a vocabulary of 101.
ANY: dict[str, list[Any]] = {
    "min_new_tokens": [3, 9],
    "min_length": [12],
    "eos_token_id": [3, [5, 17, 40, 41, 42, 43, 44]],
    "repetition_penalty": [1.4, 0.8],
    "encoder_repetition_penalty": [1.3],
    "no_repeat_ngram_size": [1, 2],
    "encoder_no_repeat_ngram_size": [1, 2],
    "bad_words_ids": [[[5], [7, 8], [20]], [[number] for number in range(30, 60)]],
    "sequence_bias": [{(7,): 3.0, (8, 9): -5.0}, [[[11], 4.0]]],
    "forced_bos_token_id": [7],
    "forced_eos_token_id": [9],  # of several, the scores are equal
    "exponential_decay_length_penalty": [(2, 1.4)],
    "suppress_tokens": [list(range(0, 90, 2))],
    "begin_suppress_tokens": [list(range(50))],
    "renormalize_logits": [True],
    "remove_invalid_values": [True],
    "guidance_scale": [1.7],
    "watermarking_config": [
        WatermarkingConfig(bias=2.5),
        WatermarkingConfig(bias=3.0, context_width=2, seeding_scheme="selfhash"),
        SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3),
    ],
    "stop_strings": ["e", ["bc", "ffa", "aed", "dd"]],
    "logits_processor": [[Lift()]],
    "stopping_criteria": [[Multiple()]],
    "prefix_allowed_tokens_fn": [even_after_odd],
    "max_time": [10_000.0],
}
DRAWN: dict[str, list[Any]] = {
    "temperature": [0.4, 1.0, 1.8],
    "top_k": [1, 4, 40],
    "top_p": [0.3, 0.9],
    "min_p": [0.05, 0.3],
    "top_h": [0.4, 0.9],
    "typical_p": [0.4, 0.9],
    "epsilon_cutoff": [0.02],
    "eta_cutoff": [0.02],
}
WITH: dict[str, dict[str, Any]] = {"exponential_decay_length_penalty": {"eos_token_id": 5}}  # what it cannot do without
LENGTHS: list[dict[str, Any]] = [{"max_new_tokens": 8}, {"max_length": 74}, {"max_new_tokens": 1}]


@cache
def _generator(family: str) -> BatchGenerator:
    return BatchGenerator(build(family), letter_tokenizer())


def _prompts(seed: int, count: int = 4) -> list[list[int]]:
    return random_prompts(random.Random(seed), VOCABULARY, "mixed", count)[:count]


def check(family: str, prompts: list[list[int]], options: dict[str, Any]) -> int:
    """How many rows were looked at to their end."""
    for name, others in WITH.items():
        if name in options:
            options = others | options
    model, tokens = build(family), _tokens(options)
    try:
        result = _generator(family).generate(prompts, seed=SEED, progress=False, **options)
    except RuntimeError:  # nothing is left to draw from
        assert any(_cannot_be_drawn(model, prompt, options | tokens) for prompt in prompts)
        return 0
    assert len(result) == len(prompts) * options.get("num_return_sequences", 1)
    return sum(check_row(model, row, options | tokens, SEED) for row in result)


def _cannot_be_drawn(model: PreTrainedModel, prompt: list[int], options: dict[str, Any]) -> bool:
    """Whether ``generate`` fails, in some of several tries."""
    ids = torch.tensor([prompt])
    for _ in range(20):
        try:
            model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        except RuntimeError:
            return True
    return False


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ANY)
def test_an_option_by_itself(name: str, family: str) -> None:
    prompts = _prompts(1)
    for value in ANY[name]:
        assert check(family, prompts, {"max_new_tokens": 8, name: value}) >= 3


@pytest.mark.parametrize("name", [*ANY, *DRAWN])
def test_an_option_by_itself_with_sampling(name: str) -> None:
    for value in (ANY | DRAWN)[name]:
        options = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 2, name: value}
        assert check("llama", _prompts(2), options) >= 6


def _some(table: dict[str, list[Any]], most: int) -> st.SearchStrategy[dict[str, Any]]:
    names = st.lists(st.sampled_from(sorted(table)), max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: st.sampled_from(table[name]) for name in chosen}))


@settings(max_examples=15)
@given(
    st.sampled_from(FAMILIES),
    st.integers(0, 1000),
    st.sampled_from(LENGTHS),
    _some(ANY, 5),
    st.one_of(st.none(), _some(DRAWN, 3)),
)
def test_options_together(
    family: str, seed: int, length: dict[str, Any], some: dict[str, Any], drawn: dict[str, Any] | None
) -> None:
    sampling = {} if drawn is None else {"do_sample": True, "num_return_sequences": 1 + seed % 2, **drawn}
    check(family, _prompts(seed, 3), {**length, **some, **sampling})


_SETTINGS = st.tuples(_some(ANY, 2), st.one_of(st.none(), _some(DRAWN, 2)))
_ARGUMENTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")  # of the call, not of a config


@settings(max_examples=15)
@given(st.integers(0, 1000), st.lists(_SETTINGS, min_size=4, max_size=4))
def test_each_prompt_has_its_own_settings(
    seed: int, chosen: list[tuple[dict[str, Any], dict[str, Any] | None]]
) -> None:
    every: list[dict[str, Any]] = []
    for number, (some, drawn) in enumerate(chosen):
        options = {name: value for name, value in some.items() if name not in _ARGUMENTS}
        for name in WITH.keys() & options.keys():
            options = WITH[name] | options
        every.append(
            {"max_new_tokens": 4 + number, **options} | ({} if drawn is None else {"do_sample": True, **drawn})
        )
    prompts, model = _prompts(seed), build("llama")
    configs = [GenerationConfig(**options) for options in every]
    try:
        result = _generator("llama").generate(prompts, configs, seed=SEED, progress=False)
    except RuntimeError:
        pairs = zip(prompts, every, strict=True)
        assert any(_cannot_be_drawn(model, prompt, options | _tokens(options)) for prompt, options in pairs)
        return
    assert [row.index for row in result] == list(range(4))
    for row, options in zip(result, every, strict=True):
        check_row(model, row, options | _tokens(options), SEED)


def _tokens(options: dict[str, Any]) -> dict[str, Any]:
    return {"tokenizer": letter_tokenizer()} if "stop_strings" in options else {}
