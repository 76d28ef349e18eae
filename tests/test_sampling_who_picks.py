"""A prompt's samples are the same whether the host or the device picks the tokens of its call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on
from support_parity import mixed_prompts, pages_of_memory
from transformers import GenerationConfig, WatermarkingConfig

from hf_batchllm import BatchGenerator
from hf_batchllm.sampling.host_sampler import HostSampler
from hf_batchllm.sampling.processor_chains import ProcessorChains

MANY = {"logprobs": 40}  # more than the device finds: the host picks the tokens
_SAMPLED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 20},
    {"top_k": 0, "top_p": 0.8},
    {"min_p": 0.05, "top_k": 0},
    {"repetition_penalty": 1.3, "top_k": 0},
    {"typical_p": 0.7, "top_k": 0, "temperature": 1.4},
    {"epsilon_cutoff": 0.008, "top_k": 40},
    {"eta_cutoff": 0.02, "top_p": 0.95, "top_k": 0},
]


@pytest.mark.some_cases
@pytest.mark.parametrize("options", _SAMPLED, ids=str)
def test_samples_do_not_depend_on_who_picks(
    options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    picked: list[int] = []
    pick = HostSampler.without_waiting

    def noted(self: HostSampler, logits: torch.Tensor, requests: Any) -> torch.Tensor:
        picked.append(len(requests))
        return pick(self, logits, requests)

    monkeypatch.setattr(HostSampler, "without_waiting", noted)
    prompts = mixed_prompts(1)
    asked = {"do_sample": True, "max_new_tokens": 12, "seed": 5, "progress": False, **options}
    with BatchGenerator(model_on(device, "llama")) as generator:
        alone = generator.generate(prompts, **asked).token_ids
        assert not picked  # on the device
        with_logprobs = generator.generate(prompts, logprobs=1, **asked).token_ids
        assert not picked
        by_host = generator.generate(prompts, **MANY, **asked).token_ids
        assert picked
        # One more prompt, whose option needs transformers' own code.
        config = {name: value for name, value in asked.items() if name not in ("seed", "progress")}
        configs = [GenerationConfig(**config) for _ in prompts]
        other = GenerationConfig(max_new_tokens=12, watermarking_config=WatermarkingConfig())
        picked.clear()
        beside = generator.generate([*prompts, [3, 4, 3, 4]], [*configs, other], seed=5, progress=False).token_ids
        assert picked
    assert with_logprobs == alone == beside[:-1] == by_host


def test_the_device_picks_for_the_neighbours_of_a_prompt_that_needs_the_host(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: set[int] = set()
    of = ProcessorChains.of

    def noted(self: ProcessorChains, request: Any) -> Any:
        made.add(request.index)
        return of(self, request)

    monkeypatch.setattr(ProcessorChains, "of", noted)
    prompts = mixed_prompts(1)
    kinds: list[dict[str, Any]] = [
        {"do_sample": True, "repetition_penalty": 1.3, "num_return_sequences": 2},
        {"no_repeat_ngram_size": 2},
        {"do_sample": True, "top_p": 0.9, "bad_words_ids": [[5], [6, 7]], "min_new_tokens": 3},
        {"do_sample": True, "typical_p": 0.8},
        {},
    ]
    configs = [GenerationConfig(max_new_tokens=9, **kinds[place % len(kinds)]) for place in range(len(prompts))]
    marked = GenerationConfig(max_new_tokens=7, watermarking_config=WatermarkingConfig())
    model = model_on(device, "llama")
    with BatchGenerator(model, kv_memory=pages_of_memory(model, 8, 16), page_size=16) as generator:
        alone = generator.generate(prompts, configs, seed=5, progress=False).token_ids
        assert not made
        both = [*prompts, *prompts], [*configs, *[marked] * len(prompts)]
        beside = generator.generate(*both, seed=5, progress=False)
    assert beside.token_ids[: len(alone)] == alone
    assert made == set(range(len(prompts), 2 * len(prompts)))


def test_seeds_of_each_prompt(device: str) -> None:
    prompts = mixed_prompts(1)
    seeds = [2**64 - 1 - 7 * place for place in range(len(prompts))]
    asked: dict[str, Any] = {"do_sample": True, "max_new_tokens": 8, "num_return_sequences": 2, "progress": False}
    with BatchGenerator(model_on(device, "gpt2")) as generator:
        alone = generator.generate(prompts, seed=seeds, **asked).token_ids
        by_host = generator.generate(prompts, seed=seeds, **MANY, **asked).token_ids
        assert by_host == alone
