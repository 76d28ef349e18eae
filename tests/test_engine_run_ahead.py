"""Steps launched before the tokens of earlier ones have been seen: the same tokens, whatever ends and whenever."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support_device_loop import assert_best
from support_families import build, family_params, random_prompts, reference_generate
from support_parity import assert_parity, each_config_with_some, mixed_prompts, pages_of_memory
from support_parity import watched as watched  # a fixture

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.loop import Engine
from hf_batchllm.planning.scheduler import FifoScheduler, GroupScheduler

NEW_TOKENS = 8


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Every engine that ran."""
    seen: list[Engine] = []
    run = Engine.run

    def noted_run(self: Engine, *arguments: Any) -> Any:
        seen.append(self)
        return run(self, *arguments)

    monkeypatch.setattr(Engine, "run", noted_run)
    return seen


DEPTHS_AND_CONFIGS: list[tuple[int, dict[str, Any]]] = [
    (2, {}), (5, {}), (5, {"scheduler": "fifo"}), (2, {"max_batch_tokens": 7, "page_size": 4}),
]  # fmt: skip


@pytest.mark.some_cases
@pytest.mark.parametrize(("family", "depth_and_config"), each_config_with_some(DEPTHS_AND_CONFIGS, 2))
def test_tokens_are_those_of_generate(
    family: str, depth_and_config: Any, watched: list[Any], engines: list[Engine]
) -> None:
    depth, config = depth_and_config
    prompts = mixed_prompts(3)
    generator = BatchGenerator(build(family), steps_per_sync=depth, **config)
    result = generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False)
    assert engines[0].depth == depth
    assert_parity(family, prompts, result, NEW_TOKENS)
    assert result.report.computed_tokens == generator.plan(prompts).computed_tokens
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.some_cases
@pytest.mark.parametrize("depth", [2, 3, 8])
@pytest.mark.parametrize("family", family_params(["llama", "gemma2"]))
def test_requests_that_end_at_any_step(family: str, depth: int, watched: list[Any], engines: list[Engine]) -> None:
    """Half of all tokens end an answer. What runs beyond the end is counted, and belongs to no answer."""
    prompts, stops = mixed_prompts(4), list(range(0, 97, 2))
    generator = BatchGenerator(build(family), steps_per_sync=depth, page_size=8)
    result = generator.generate(prompts, max_new_tokens=30, eos_token_id=stops, progress=False)
    assert_best("cpu", family, prompts, result, 30, stops)
    assert engines[0].idle_tokens > 0
    assert result.report.computed_tokens == generator.plan(prompts).computed_tokens


@pytest.mark.some_cases
@pytest.mark.parametrize(("family", "depth"), [("llama", 2), ("gemma2", 6), ("gpt_oss", 6)])
def test_preempted_requests_are_computed_again_from_tokens_that_were_seen(
    family: str, depth: int, watched: list[Any]
) -> None:
    rng = random.Random(2)
    prompts = [prompt for kind in ("nested", "distinct") for prompt in random_prompts(rng, 97, kind, 8)]
    memory = pages_of_memory(build(family), 20, 8)
    options = {"kv_memory": memory, "page_size": 8, "min_shared_tokens": 1, "steps_per_sync": depth}
    result = BatchGenerator(build(family), **options).generate(
        prompts, max_new_tokens=40, eos_token_id=1000, progress=False
    )
    assert result.report.preemptions > 0
    assert_parity(family, prompts, result, 40)
    assert watched[0].free_pages == watched[0].num_pages


def test_one_long_answer_among_short_ones(watched: list[Any]) -> None:
    prompts = mixed_prompts(2)
    lengths = {0: 60}
    generator = BatchGenerator(build("llama"), steps_per_sync=4, page_size=8)
    long = generator.generate(prompts[:1], max_new_tokens=lengths[0], progress=False)
    assert_parity("llama", prompts[:1], long, lengths[0])


def test_what_needs_the_host_is_not_run_ahead(engines: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_batchllm.sampling.device_options._KEPT_BYTES", 10)
    prompts = mixed_prompts(1)
    generator = BatchGenerator(build("llama"), steps_per_sync=4)
    generator.generate(prompts, max_new_tokens=3, repetition_penalty=1.2, progress=False)
    generator.generate(prompts, max_new_tokens=3, progress=False)
    assert [engine.depth for engine in engines] == [1, 4]


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma2", {"repetition_penalty": 1.7}),
        ("llama", {"repetition_penalty": 0.8, "min_new_tokens": 6}),
        ("llama", {"min_length": 12}),
    ],
)
def test_what_looks_back_looks_at_tokens_that_nobody_has_seen(
    family: str, options: dict[str, Any], watched: list[Any], engines: list[Engine]
) -> None:
    """Penalties and minimum lengths, with preemption; the oracle is ``generate`` itself."""
    model, prompts = build(family), mixed_prompts(2)
    options |= {"max_new_tokens": 12, "eos_token_id": list(range(0, 97, 3)), "pad_token_id": 0}
    memory = pages_of_memory(model, 20, 8)
    alone = [reference_generate(model, prompt, **options) for prompt in prompts]
    for config in ({"steps_per_sync": 4}, {"steps_per_sync": 3, "kv_memory": memory, "page_size": 8}):
        result = BatchGenerator(model, **config).generate(prompts, progress=False, **options)
        assert result.token_ids == alone
    assert all(engine.depth > 1 for engine in engines)


class Plain(FifoScheduler):
    """One that does not know of tokens yet to be seen."""

    runs_ahead = False


@pytest.mark.parametrize(("scheduler", "depth"), [(Plain(), 1), (GroupScheduler(), 4)])
def test_a_scheduler_says_whether_it_can_do_without_tokens(scheduler: Any, depth: int, engines: list[Engine]) -> None:
    prompts = mixed_prompts(2)
    generator = BatchGenerator(build("llama"), steps_per_sync=4, scheduler=scheduler)
    assert_parity("llama", prompts, generator.generate(prompts, max_new_tokens=5, progress=False), 5)
    assert engines[0].depth == depth
