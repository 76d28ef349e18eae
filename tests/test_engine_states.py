"""Models whose layers carry a state from token to token: the state of a prefix is where it must be, and when."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import pytest
import torch
from support_families import CARRYING, build, family_params, random_prompts, reference_generate
from support_families import FAMILIES as FAMILIES_OF_ALL
from support_parity import assert_parity, counted_tokens
from support_parity import watched as watched  # a fixture

from hf_batchllm import BatchGenerator, CacheMemoryError, PromptError, UnsupportedModelError
from hf_batchllm.engine.loop import AtOnce
from hf_batchllm.planning.requests_and_prefixes import Unit
from hf_batchllm.planning.scheduler import GroupScheduler

FAMILIES = ["qwen3_next", "falcon_h1", "lfm2", "mamba2", "jamba"]
NEW_TOKENS = 6


def draw(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(count)]


def nested(count: int = 3) -> list[list[int]]:
    """Several prefixes, prefixes of prefixes, equal prompts, and a prompt that is a prefix of others."""
    prompts = []
    for group in range(count):
        outer = draw(group, 41 + group)
        inner = outer + draw(100 + group, 23)
        prompts += [outer + draw(200 + group, 5), inner + draw(300 + group, 9), inner + draw(400 + group, 1), inner]
        prompts += [outer, inner + draw(300 + group, 9)]
    random.Random(1).shuffle(prompts)
    return prompts


def slots_of_memory(model: Any, slots: int, pages: int, page_size: int) -> int:
    architecture = BatchGenerator(model).architecture
    return slots * architecture.slot_bytes + pages * page_size * architecture.kv_bytes_per_token


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(CARRYING))
def test_each_shared_token_is_run_once(family: str) -> None:
    model, prompts = build(family), nested()
    with BatchGenerator(model, min_shared_tokens=1, max_batch_tokens=50) as generator, counted_tokens(model) as sizes:
        plan = generator.plan(prompts)
        result = generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False)
    begun = re.search(r"(\d+) runs of tokens began with that of a prefix or a prompt", str(result.report))
    assert begun is not None and int(begun[1]) == len(prompts) + sum(each.parent >= 0 for each in plan.segments)
    assert sum(sizes) == plan.computed_tokens + sum(len(each.token_ids) - 1 for each in result)
    assert max(sizes) <= 50
    assert_parity(family, prompts, result, NEW_TOKENS)


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(FAMILIES))
@pytest.mark.parametrize("slots", [7, 10])
def test_few_slots_change_nothing(family: str, slots: int, watched: list[Any]) -> None:
    """Requests wait for a slot; prefixes without a running reader give theirs up where nothing else helps."""
    prompts = nested()
    memory = slots_of_memory(build(family), slots, 20, 8)
    with BatchGenerator(build(family), kv_memory=memory, page_size=8, min_shared_tokens=1) as generator:
        assert_parity(family, prompts, generator.generate(prompts, max_new_tokens=NEW_TOKENS), NEW_TOKENS)
    (cache,) = watched
    assert cache.slots.free == cache.slots.count < len(prompts) + 4, "there were enough for all"


@pytest.mark.some_cases
@pytest.mark.parametrize("new", [1, 40])
def test_a_prefix_is_worth_the_place_of_its_state(new: int) -> None:
    """Where memory is short a prefix takes a sequence's place: the more so, the more steps its readers run."""
    prompts = [draw(pair, 40) + draw(50 + pair, own) for pair in range(6) for own in (3, 5)]
    memory = slots_of_memory(build("mamba2"), 6, 0, 8)
    with BatchGenerator(build("mamba2"), kv_memory=memory, page_size=8, min_shared_tokens=8) as generator:
        result = generator.generate(prompts, max_new_tokens=new, progress=False)
        assert_parity("mamba2", prompts, result, new)
        assert len(result.report.plan.segments) == (6 if new == 1 else 0)
        assert ("the memory of a prefix's state is worth" in str(result.report)) == (new == 40)
    with BatchGenerator(build("mamba2"), page_size=8, min_shared_tokens=8) as generator:
        report = generator.generate(prompts, max_new_tokens=new, progress=False).report
        assert len(report.plan.segments) == 6


def test_a_small_state_is_worth_little() -> None:
    """Where keys and values fill the memory, a prefix spares more of it than its state takes."""
    head = draw(1, 120)
    prompts = [head + draw(50 + own, own) for own in (3, 5, 6)]
    memory = slots_of_memory(build("lfm2"), 4, 24, 8)
    with BatchGenerator(build("lfm2"), kv_memory=memory, page_size=8) as generator:
        report = generator.generate(prompts, max_new_tokens=40, progress=False).report
    assert len(report.plan.segments) == 1 and 0 < report.plan.state_price <= 4


@pytest.mark.parametrize("family", family_params(["qwen3_next"]))
def test_memory_for_no_state_is_an_error_that_says_so(family: str) -> None:
    memory = slots_of_memory(build(family), 1, 0, 8) // 2
    generator = BatchGenerator(build(family), kv_memory=memory, page_size=8)
    with pytest.raises(CacheMemoryError, match="the states of a sequence take"):
        generator.generate(nested(), max_new_tokens=NEW_TOKENS, progress=False)


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(FAMILIES))
def test_kept_prefixes_are_found_at_their_ends(family: str) -> None:
    model, head = build(family), draw(1, 60)
    with BatchGenerator(model, keep_prefixes=4, min_shared_tokens=1, page_size=8) as generator:
        first = [head + draw(seed, 7) for seed in (2, 3)]
        assert_parity(family, first, generator.generate(first, max_new_tokens=NEW_TOKENS), NEW_TOKENS)
        again = [head + draw(seed, 9) for seed in (4, 5, 6)]
        result = generator.generate(again, max_new_tokens=NEW_TOKENS)
        assert result.report.cached_tokens == len(head)
        assert_parity(family, again, result, NEW_TOKENS)
        parting = [head[:40] + draw(seed, 9) for seed in (7, 8)]  # its state at 40 tokens is gone
        result = generator.generate(parting, max_new_tokens=NEW_TOKENS)
        assert result.report.cached_tokens == 0
        assert_parity(family, parting, result, NEW_TOKENS)
        longer = [head + draw(2, 7) + draw(9, 3), head[:30]]
        assert_parity(family, longer, generator.generate(longer, max_new_tokens=NEW_TOKENS), NEW_TOKENS)


class _Never(set[Unit]):
    def __contains__(self, unit: object) -> bool:
        return False


class Careless(GroupScheduler):
    """Runs units beside the prefix that they stand on, as schedulers may."""

    def start(self, *given: Any) -> None:
        super().start(*given)
        self._at_work_now = _Never()


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(FAMILIES))
def test_schedulers_need_not_know_of_states(family: str) -> None:
    prompts = nested()
    with BatchGenerator(build(family), scheduler=Careless(), min_shared_tokens=1) as generator:
        assert_parity(family, prompts, generator.generate(prompts, max_new_tokens=NEW_TOKENS), NEW_TOKENS)


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(FAMILIES))
def test_samples_begin_with_the_state_of_their_prompt(family: str) -> None:
    prompts = random_prompts(random.Random(3), 97, "nested", 4)
    given: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "seed": 5, "progress": False}
    with BatchGenerator(build(family), min_shared_tokens=1) as generator:
        several = generator.generate(prompts, num_return_sequences=3, **given)
    with BatchGenerator(build(family), share_prefixes=False, max_batch_tokens=40) as generator:
        apart = generator.generate(prompts, num_return_sequences=3, **given)
    assert [each.token_ids for each in several] == [each.token_ids for each in apart]
    assert len({tuple(each.token_ids) for each in several}) > len(prompts)


def test_a_step_without_memory_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its states have moved on."""
    launch, left = AtOnce.launch, iter([False, True, False])

    def launched(self: AtOnce, *given: Any) -> Any:
        if next(left, False):
            raise torch.OutOfMemoryError("injected")
        return launch(self, *given)

    monkeypatch.setattr(AtOnce, "launch", launched)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        BatchGenerator(build("qwen3_next")).generate(nested(), max_new_tokens=NEW_TOKENS, progress=False)
    assert any("carry a state" in note for note in caught.value.__notes__)


def test_what_a_pass_carries_is_in_the_memory_of_a_call() -> None:
    prompts = [draw(seed, 30) for seed in range(4)]
    with BatchGenerator(build("mamba2"), page_size=8) as generator:  # no layer attends: pages take no memory
        report = generator.generate(prompts, max_new_tokens=2, progress=False).report
        assert report.kv_memory == report.peak_memory == 4 * generator.architecture.slot_bytes > 0


class Scaled(torch.nn.Linear):
    """An owner's: it treats every token alike."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(["qwen3_5", "falcon_h1", "lfm2", "mamba2", "zamba"]))
def test_an_owners_code_that_treats_every_token_alike_is_served(family: str) -> None:
    model = FAMILIES_OF_ALL[family]()
    for name, module in [*model.named_modules()]:
        if name.endswith(("out_proj", "o_proj")) and type(module) is torch.nn.Linear:
            module.__class__ = Scaled
    prompts = [draw(1, 20) + draw(2, 4), draw(1, 20) + draw(3, 6), draw(4, 9)]
    with BatchGenerator(model, min_shared_tokens=1) as generator:
        made = generator.generate(prompts, max_new_tokens=4, progress=False).token_ids
    assert made == [reference_generate(model, prompt, max_new_tokens=4) for prompt in prompts]


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(["qwen3_next", "mamba2"]))
def test_no_call_has_more_memory_than_it_may(family: str) -> None:
    """Kept prefixes, pages and slots need not stand in the proportion that the next call wants."""
    model = build(family)
    limit = slots_of_memory(model, 9, 14, 8)
    with BatchGenerator(model, kv_memory=limit, keep_prefixes=6, page_size=8, min_shared_tokens=1) as generator:
        for seed, own in ((0, 3), (1, 40), (2, 1), (3, 25), (0, 30)):
            prompts = [draw(seed, 30) + draw(10 * seed + each, own) for each in range(4)]
            result = generator.generate(prompts, max_new_tokens=3, progress=False)
            assert result.report.kv_memory <= limit
            assert_parity(family, prompts, result, 3)


def test_the_memory_that_a_message_asks_for_is_enough() -> None:
    model, prompt = build("qwen3_next"), draw(5, 100)
    generator = BatchGenerator(model, kv_memory=slots_of_memory(model, 1, 5, 8), page_size=8)
    with pytest.raises(PromptError) as caught:
        generator.generate([prompt], max_new_tokens=4, progress=False)
    asked = re.search(r'raise `kv_memory` \(to "([^"]+)"', str(caught.value))
    assert asked is not None and "for its states" in str(caught.value)
    BatchGenerator(model, kv_memory=asked[1], page_size=8).generate([prompt], max_new_tokens=4, progress=False)


def test_prompts_that_run_one_by_one_run_together() -> None:
    """Deep prefixes take a state each: without memory for these, a prompt runs without prefixes."""
    model, prompts, text = build("qwen3_next"), [], draw(1, 20)
    for level in range(6):
        text = text + draw(2 + level, 12)
        prompts += [text + draw(20 + level, 3), text + draw(40 + level, 4)]
    memory = slots_of_memory(model, 1, 14, 8)
    with pytest.warns(UserWarning, match="fit into the KV cache only alone"):
        result = BatchGenerator(model, kv_memory=memory, page_size=8, min_shared_tokens=1).generate(
            prompts, max_new_tokens=3, progress=False
        )
    assert_parity("qwen3_next", prompts, result, 3)


def test_another_activation_behind_a_convolution_is_refused_by_name() -> None:
    family = FAMILIES_OF_ALL["qwen3_5"]
    model = dataclasses.replace(family, config={**family.config, "hidden_act": "gelu"})()
    with pytest.raises(UnsupportedModelError, match="'gelu' stands behind a short convolution"):
        BatchGenerator(model)
