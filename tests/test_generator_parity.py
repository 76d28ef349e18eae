"""Greedy tokens in float32 are those of ``model.generate``, one prompt at a time, for every family."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support_cases import SOME
from support_families import FAMILIES, build, family_params, random_prompts
from support_parity import (
    are_greedy,
    assert_parity,
    counted_tokens,
    each_config_with_some,
    mixed_prompts,
    pages_of_memory,
    reference,
    tries,
)
from support_parity import watched as watched  # a fixture

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.inputs.prompts import prepare_prompts
from hf_batchllm.planning.sharing import make_plan

NEW_TOKENS = 8


def run(family: str, prompts: list[list[int]], new_tokens: int = NEW_TOKENS, **config: Any) -> BatchResult:
    with BatchGenerator(build(family), **config) as generator:
        return generator.generate(prompts, max_new_tokens=new_tokens, progress=False)


@pytest.mark.parametrize("family", family_params())
def test_every_family_gives_the_tokens_of_generate(family: str, watched: list[Any]) -> None:
    many = mixed_prompts(3)
    small: dict[str, Any] = {"page_size": 4, "max_batch_tokens": 23, "min_shared_tokens": 1}
    runs = [(many, {}), (many[::2], small)]
    if SOME and list(FAMILIES).index(family) % 3:  # small pages and steps are in the tests below, too
        del runs[1]
    for prompts, config in runs:
        result = run(family, prompts, **config)
        assert_parity(family, prompts, result, NEW_TOKENS)
        assert result.report.saving > 0.2
    assert all(cache.free_pages == cache.num_pages for cache in watched)


CONFIGS: list[dict[str, Any]] = [
    {"max_batch_tokens": 1},
    {"max_batch_tokens": 7, "page_size": 16},
    {"max_batch_tokens": 1 << 20, "page_size": 256},
    {"page_size": 1, "min_shared_tokens": 0},
    {"share_prefixes": False},
    {"scheduler": "fifo", "max_batch_tokens": 31, "min_shared_tokens": 1},
]


@pytest.mark.some_cases
@pytest.mark.parametrize(("family", "config"), each_config_with_some(CONFIGS, 2))
def test_budgets_page_sizes_and_schedulers_change_nothing(
    family: str, config: dict[str, Any], watched: list[Any]
) -> None:
    prompts = mixed_prompts(1 if config.get("max_batch_tokens") == 1 else 3)
    assert_parity(family, prompts, run(family, prompts, **config), NEW_TOKENS)


@pytest.mark.some_cases
@pytest.mark.parametrize(("family", "page_size"), each_config_with_some([1, 8], 3))
def test_preemption_changes_nothing(family: str, page_size: int, watched: list[Any]) -> None:
    rng = random.Random(2)
    prompts = [prompt for kind in ("nested", "distinct") for prompt in random_prompts(rng, 97, kind, 8)]
    memory = pages_of_memory(build(family), 160 // page_size, page_size)
    config = {"kv_memory": memory, "page_size": page_size, "min_shared_tokens": 1}
    generator = BatchGenerator(build(family), **config)
    # With an EOS answers may end at any time, so fewer tokens are expected than there are; this one never comes.
    result = generator.generate(prompts, max_new_tokens=40, eos_token_id=1000, progress=False)
    assert result.report.preemptions > 0
    assert result.report.recomputed_tokens > 0
    assert_parity(family, prompts, result, 40)
    assert watched[0].free_pages == watched[0].num_pages


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(["llama", "deepseek_v3", "gpt2", "qwen3_moe", "gpt_oss"]))
def test_the_model_runs_over_exactly_the_planned_tokens(family: str) -> None:
    prompts = mixed_prompts(2)
    model = build(family)
    for config in ({"min_shared_tokens": 1}, {}, {"share_prefixes": False}, {"max_batch_tokens": 5}):
        generator = BatchGenerator(model, **config)
        plan = generator.plan(prompts)
        with counted_tokens(model) as sizes:
            result = generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False)
        decoded = sum(len(generation.token_ids) - 1 for generation in result)
        assert sum(sizes) == plan.computed_tokens + decoded
        assert max(sizes) <= (config.get("max_batch_tokens") or 2048)
        assert result.report.computed_tokens == plan.computed_tokens
        if config.get("share_prefixes") is False:
            assert plan.computed_tokens == sum(map(len, prompts))


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(["llama", "gpt_oss"]))
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    prompts=tries(),
    page_size=st.sampled_from([1, 2, 3, 5, 8, 16, 64, 256]),
    budget=st.sampled_from([1, 2, 5, 17, 64, 4096]),
    fee=st.sampled_from([0, 1, 3, 16]),
    spare_pages=st.sampled_from([0, 1, 4, 1000]),
    scheduler=st.sampled_from(["groups", "groups", "fifo"]),
)
def test_any_list_any_budget_any_memory(
    family: str,
    prompts: list[list[int]],
    page_size: int,
    budget: int,
    fee: int,
    spare_pages: int,
    scheduler: str,
    watched: list[Any],
) -> None:
    longest = max(map(len, prompts)) + NEW_TOKENS
    memory = pages_of_memory(build(family), -(-longest // page_size) + spare_pages, page_size)
    config = {"page_size": page_size, "max_batch_tokens": budget, "min_shared_tokens": fee, "scheduler": scheduler}
    generator = BatchGenerator(build(family), kv_memory=memory, **config)
    result = generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False)
    rows = [(tuple(prompt), tuple(result[index].token_ids)) for index, prompt in enumerate(prompts)]
    for (prompt_ids, tokens), greedy in zip(rows, are_greedy(family, rows, NEW_TOKENS), strict=True):
        expected, sure = (tokens, NEW_TOKENS) if greedy else reference(family, prompt_ids, NEW_TOKENS)
        assert list(tokens[:sure]) == list(expected[:sure])
    assert all(cache.free_pages == cache.num_pages for cache in watched)


def test_the_zoo_has_every_family_that_is_promised() -> None:
    promised = (
        "llama mistral qwen2 qwen3 qwen3_moe gemma gemma2 gemma3 phi phi3 olmo2 olmo3 granite gpt_oss cohere cohere2 "
        "smollm3 starcoder2 mixtral exaone4 gpt_neox gpt2 opt deepseek_v3 glm4"
    ).split()
    assert set(promised) <= set(FAMILIES)


def test_the_plan_of_a_call_is_the_plan_shown() -> None:
    prompts = mixed_prompts()
    generator = BatchGenerator(build("llama"))
    shown = generator.plan(prompts)
    planned = make_plan(prepare_prompts(prompts), generator.config, 1)
    assert (shown.computed_tokens, shown.total_tokens) == (planned.computed_tokens, planned.total_tokens)
