"""Models whose layers carry a state from token to token: the state of a prefix is where it must be, and when."""

from __future__ import annotations

import copy
import dataclasses
import random
import re
from typing import Any

import pytest
import torch
from support_calls import answers, as_generate, failing
from support_device_loop import DEVICES
from support_families import CARRYING, build, family_params, random_prompts, reference_generate
from support_families import FAMILIES as FAMILIES_OF_ALL
from support_parity import assert_parity, counted_tokens
from support_parity import watched as watched  # a fixture
from support_score import assert_right, questions

from hf_batchllm import BatchGenerator, CacheMemoryError, PromptError, UnsupportedModelError
from hf_batchllm.engine.at_once import AtOnce
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
        result = generator.generate(prompts, max_new_tokens=NEW_TOKENS)
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
    as_generate(family, prompts, NEW_TOKENS, {"kv_memory": memory, "page_size": 8, "min_shared_tokens": 1})
    (cache,) = watched
    assert cache.slots.free == cache.slots.count < len(prompts) + 4, "there were enough for all"


@pytest.mark.some_cases
@pytest.mark.parametrize("new", [1, 40])
def test_a_prefix_is_worth_the_place_of_its_state(new: int) -> None:
    """Where memory is short a prefix takes a sequence's place: the more so, the more steps its readers run."""
    prompts = [draw(pair, 40) + draw(50 + pair, own) for pair in range(6) for own in (3, 5)]
    config: dict[str, Any] = {"page_size": 8, "min_shared_tokens": 8}
    memory = slots_of_memory(build("mamba2"), 6, 0, 8)
    report = as_generate("mamba2", prompts, new, config | {"kv_memory": memory}).report
    assert len(report.plan.segments) == (6 if new == 1 else 0)
    assert ("the memory of a prefix's state is worth" in str(report)) == (new == 40)
    assert len(answers("mamba2", prompts, config, max_new_tokens=new).report.plan.segments) == 6


def test_a_small_state_is_worth_little() -> None:
    """Where keys and values fill the memory, a prefix spares more of it than its state takes."""
    head = draw(1, 120)
    prompts = [head + draw(50 + own, own) for own in (3, 5, 6)]
    memory = slots_of_memory(build("lfm2"), 4, 24, 8)
    report = answers("lfm2", prompts, {"kv_memory": memory, "page_size": 8}, max_new_tokens=40).report
    assert len(report.plan.segments) == 1 and 0 < report.plan.state_price <= 4


def test_memory_for_no_state_is_an_error_that_says_so() -> None:
    memory = slots_of_memory(build("qwen3_next"), 1, 0, 8) // 2
    with pytest.raises(CacheMemoryError, match="the states of a sequence take"):
        answers("qwen3_next", nested(), {"kv_memory": memory, "page_size": 8}, max_new_tokens=NEW_TOKENS)


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(FAMILIES))
def test_kept_prefixes_are_found_at_their_ends(family: str) -> None:
    model, head = build(family), draw(1, 60)
    with BatchGenerator(model, keep_prefixes=4, min_shared_tokens=1, page_size=8) as generator:
        for cached, prompts in (
            (0, [head + draw(seed, 7) for seed in (2, 3)]),
            (len(head), [head + draw(seed, 9) for seed in (4, 5, 6)]),
            (0, [head[:40] + draw(seed, 9) for seed in (7, 8)]),  # its state at 40 tokens is gone
            (None, [head + draw(2, 7) + draw(9, 3), head[:30]]),
        ):
            result = generator.generate(prompts, max_new_tokens=NEW_TOKENS)
            assert cached in (None, result.report.cached_tokens)
            assert_parity(family, prompts, result, NEW_TOKENS)


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
    as_generate(family, nested(), NEW_TOKENS, {"scheduler": Careless(), "min_shared_tokens": 1})


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(FAMILIES))
def test_samples_begin_with_the_state_of_their_prompt(family: str) -> None:
    prompts = random_prompts(random.Random(3), 97, "nested", 4)
    given: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "seed": 5, "num_return_sequences": 3}
    several = answers(family, prompts, {"min_shared_tokens": 1}, **given)
    apart = answers(family, prompts, {"share_prefixes": False, "max_batch_tokens": 40}, **given)
    assert several.token_ids == apart.token_ids
    assert len({tuple(each.token_ids) for each in several}) > len(prompts)


def test_a_step_without_memory_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its states have moved on."""
    failing(monkeypatch, AtOnce, "launch", {2}, torch.OutOfMemoryError("injected"))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        answers("qwen3_next", nested(), max_new_tokens=NEW_TOKENS)
    assert any("carry a state" in note for note in caught.value.__notes__)


def test_what_a_pass_carries_is_in_the_memory_of_a_call() -> None:
    prompts = [draw(seed, 30) for seed in range(4)]
    with BatchGenerator(build("mamba2"), page_size=8) as generator:  # no layer attends: pages take no memory
        report = generator.generate(prompts, max_new_tokens=2).report
        assert report.kv_memory == report.peak_memory == 4 * generator.architecture.slot_bytes > 0


class Scaled(torch.nn.Linear):
    """A user's: it treats every token alike."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(["qwen3_5", "falcon_h1", "lfm2", "mamba2", "zamba"]))
def test_custom_code_that_treats_every_token_alike_is_served(family: str) -> None:
    model = FAMILIES_OF_ALL[family]()
    for name, module in [*model.named_modules()]:
        if name.endswith(("out_proj", "o_proj")) and type(module) is torch.nn.Linear:
            module.__class__ = Scaled
    prompts = [draw(1, 20) + draw(2, 4), draw(1, 20) + draw(3, 6), draw(4, 9)]
    made = answers(model, prompts, {"min_shared_tokens": 1}, max_new_tokens=4).token_ids
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
            result = generator.generate(prompts, max_new_tokens=3)
            assert result.report.kv_memory <= limit
            assert_parity(family, prompts, result, 3)


def test_the_memory_that_a_message_asks_for_is_enough() -> None:
    model, prompt = build("qwen3_next"), draw(5, 100)
    with pytest.raises(PromptError) as caught:
        answers(model, [prompt], {"kv_memory": slots_of_memory(model, 1, 5, 8), "page_size": 8}, max_new_tokens=4)
    asked = re.search(r'raise `kv_memory` \(to "([^"]+)"', str(caught.value))
    assert asked is not None and "for its states" in str(caught.value)
    answers(model, [prompt], {"kv_memory": asked[1], "page_size": 8}, max_new_tokens=4)


def test_prompts_that_run_one_by_one_run_together() -> None:
    """Deep prefixes take a state each: without memory for these, a prompt runs without prefixes."""
    model, prompts, text = build("qwen3_next"), [], draw(1, 20)
    for level in range(6):
        text = text + draw(2 + level, 12)
        prompts += [text + draw(20 + level, 3), text + draw(40 + level, 4)]
    config = {"kv_memory": slots_of_memory(model, 1, 14, 8), "page_size": 8, "min_shared_tokens": 1}
    with pytest.warns(UserWarning, match="fit into the KV cache only alone"):
        as_generate("qwen3_next", prompts, 3, config)


def test_another_activation_behind_a_convolution_is_refused_by_name() -> None:
    family = FAMILIES_OF_ALL["qwen3_5"]
    model = dataclasses.replace(family, config={**family.config, "hidden_act": "gelu"})()
    with pytest.raises(UnsupportedModelError, match="'gelu' stands behind a short convolution"):
        BatchGenerator(model)


# -- in calls beside plain text: scores, adapters, tensors ---------------------------------------------------


def on(device: str, model: Any) -> Any:
    return model if device == "cpu" else copy.deepcopy(model).to(device)


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(CARRYING))
@pytest.mark.filterwarnings("ignore:attention on cuda")
@pytest.mark.parametrize("device", DEVICES)
def test_scores_are_those_of_a_plain_forward(family: str, device: str, watched: list[Any]) -> None:
    """Several continuations of a context begin with its state; so do contexts with that of their prefix."""
    contexts, several = questions()
    for config in ({}, {"page_size": 4, "max_batch_tokens": 17, "keep_prefixes": 4}):
        with BatchGenerator(on(device, build(family)), min_shared_tokens=1, **config) as generator:
            for _ in range(1 + bool(config)):  # kept prefixes, the second time
                assert_right(family, contexts, several, generator.score(contexts, several))


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(CARRYING))
@pytest.mark.filterwarnings("ignore:attention on cuda")
@pytest.mark.parametrize("device", DEVICES)
def test_each_adapter_has_states_of_its_own(family: str, device: str, watched: list[Any]) -> None:
    adapters = pytest.importorskip("support_adapters")
    given, names = adapters.thrice(adapters.prompts())
    with BatchGenerator(on(device, adapters.build(family)), **adapters.PAGES) as generator:
        result = generator.generate(given, adapter=names, max_new_tokens=adapters.NEW_TOKENS)
    adapters.assert_each(family, given, names, result)
    if device == "cpu":
        adapters.assert_adapters_matter(family, adapters.prompts())


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(CARRYING))
@pytest.mark.filterwarnings("ignore:attention on cuda")
@pytest.mark.parametrize("device", DEVICES)
def test_tensors_in_and_out_are_those_of_generate(family: str, device: str) -> None:
    """Padding is no token: no state remembers it."""
    rows = [prompt[:24] for prompt in random_prompts(random.Random(3), 97, "mixed", 6)]
    ids, mask = torch.zeros(len(rows), 24, dtype=torch.long), torch.zeros(len(rows), 24, dtype=torch.long)
    for row, prompt in enumerate(rows):
        ids[row, 24 - len(prompt) :], mask[row, 24 - len(prompt) :] = torch.tensor(prompt), 1
    wanted = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 6}
    stock: Any = build(family)
    expected = stock.generate(ids, attention_mask=mask, **wanted)
    with BatchGenerator(on(device, build(family)), min_shared_tokens=4, page_size=8) as generator:
        got = generator.generate(input_ids=ids.to(device), attention_mask=mask.to(device), **wanted)
    assert got.sequences.device.type == device
    assert torch.equal(got.sequences.cpu(), expected.sequences)
    near = 1e-2 if family == "nemotron_h" else 2e-3  # `generate` differs from itself there: see docs/hybrids.md
    for ours, theirs in zip(got.logits, expected.logits, strict=True):  # [rows, vocabulary] of each step
        torch.testing.assert_close(ours.cpu(), theirs, atol=near, rtol=1e-3)
