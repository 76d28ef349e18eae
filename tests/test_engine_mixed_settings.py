"""Prompts with settings of their own in one call: each gets what it would get among its like, in the same graphs."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from support_calls import noted
from support_device_loop import assert_best, assert_same_rows, model_on, rows_of
from support_device_loop import device as device  # a fixture
from support_families import build, family_params
from support_kernels import plain
from support_parity import mixed_prompts
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.device_loop.run_ahead import RunAhead
from hf_batchllm.engine.device_loop.seats import Seats
from hf_batchllm.engine.loop import Engine
from hf_batchllm.sampling.device_sampler import DeviceSampler
from hf_batchllm.sampling.seated_sampler import SeatedSampler

pytestmark = plain

EVERYTHING: list[dict[str, Any]] = [
    {"do_sample": False, "max_new_tokens": 25, "eos_token_id": 90},
    {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "eos_token_id": [3, 4, 5]},
    {"do_sample": True, "top_k": 8, "top_p": 0.9, "temperature": 1.5, "max_new_tokens": 30},
    {"do_sample": False, "repetition_penalty": 1.6, "min_new_tokens": 7, "max_new_tokens": 20,
     "eos_token_id": list(range(0, 97, 4))},
    {"do_sample": True, "top_k": 0, "top_p": 0.7, "repetition_penalty": 1.2, "max_new_tokens": 22, "eos_token_id": 11},
    {"do_sample": True, "min_p": 0.1, "temperature": 0.7, "min_length": 30, "max_length": 50,
     "eos_token_id": list(range(1, 97, 3))},
]  # fmt: skip
GREEDY: list[dict[str, Any]] = [
    {"max_new_tokens": 25, "eos_token_id": list(range(0, 97, 9))},
    {"max_new_tokens": 18, "eos_token_id": None},
    {"max_new_tokens": 30, "eos_token_id": list(range(1, 97, 5))},
    {"max_new_tokens": 9, "eos_token_id": list(range(0, 97, 2)), "repetition_penalty": 1.5},
    {"max_new_tokens": 22, "min_new_tokens": 6, "eos_token_id": list(range(0, 97, 3))},
]


AHEAD: list[bool] = []  # of each engine, whether its tokens were picked on the device


@pytest.fixture(autouse=True)
def launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    global AHEAD
    AHEAD = noted(monkeypatch, Engine, "__init__", lambda *given: isinstance(given[3], RunAhead))


def generated(device: str, family: str, prompts: Any, configs: Any, **how: Any) -> Any:
    with BatchGenerator(model_on(device, family), page_size=8, min_shared_tokens=1, **how) as generator:
        result = generator.generate(prompts, configs, seed=5)
    assert AHEAD[-1]
    return result


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(["llama", "gemma2"]))
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("mixed", [EVERYTHING, EVERYTHING[1:3], GREEDY], ids=["everything", "sampled", "greedy"])
def test_each_prompt_has_what_it_has_among_its_like(
    mixed: list[dict[str, Any]], graphs: bool, family: str, device: str
) -> None:
    if device == "cpu" and (graphs + (family == "llama") + (mixed in (EVERYTHING, GREEDY))) % 2:
        pytest.skip("a GPU runs them all, a CPU half of them, in which each two settings meet")
    prompts = mixed_prompts(4 if device == "cuda" else 2)
    configs = [GenerationConfig(**options, pad_token_id=0) for options in mixed]
    each = list(itertools.islice(itertools.cycle(configs), len(prompts)))
    how = {"steps_per_sync": 16, "cuda_graphs": graphs}
    together = rows_of(generated(device, family, prompts, each, **how))
    different = 0
    for number, config in enumerate(configs):
        alone = rows_of(generated(device, family, prompts, config, **how))
        for index in range(number, len(prompts), len(configs)):
            different += together[index, 0] != alone[index, 0]
    assert different <= (0 if device == "cpu" else len(prompts) // 10)  # on a GPU sums may come in another order


def test_samples_of_prompts_that_differ(device: str) -> None:
    prompts = mixed_prompts(2)
    configs = [
        GenerationConfig(do_sample=True, num_return_sequences=1 + at % 3, temperature=0.5 + at / 10, max_new_tokens=9)
        for at in range(len(prompts))
    ]
    result = generated(device, "llama", prompts, configs, steps_per_sync=8)
    assert [row.index for row in result] == [at for at in range(len(prompts)) for _ in range(1 + at % 3)]
    alone = generated(device, "llama", prompts, configs[4], steps_per_sync=8)
    assert rows_of(result)[4, 1] == rows_of(alone)[4, 1]
    assert len({tuple(row.token_ids) for row in result if row.index == 5}) == 3


def test_steps_one_at_a_time_and_many_in_a_row(device: str) -> None:
    prompts = mixed_prompts(3)
    configs = [GenerationConfig(**EVERYTHING[at % 6], pad_token_id=0) for at in range(len(prompts))]
    results = [generated(device, "llama", prompts, configs, steps_per_sync=steps) for steps in (1, 2, 7, 32)]
    assert_same_rows(results, 1.0 if device == "cpu" else 0.9)


def test_limits_and_ends_of_their_own(device: str) -> None:
    """Every greedy token is the best, and each row ends by its own tokens at its own length."""
    prompts = mixed_prompts(3)
    sets = [list(range(0, 97, 9)), [1000], list(range(1, 97, 4)), [7, 8, 30]]
    limits = [5 + at % 23 for at in range(len(prompts))]
    configs = [
        GenerationConfig(max_new_tokens=limit, eos_token_id=sets[at % 4], pad_token_id=0)
        for at, limit in enumerate(limits)
    ]
    result = list(generated(device, "llama", prompts, configs, steps_per_sync=16))
    for number, stops in enumerate(sets):
        mine = [row for row in result if row.index % 4 == number]
        assert_best(device, "llama", prompts, mine, limits, stops)
    assert {row.finish_reason for row in result} == {"stop", "length"}


def test_equal_settings_cost_what_one_costs(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A list of configs that say the same is one kind: nothing is looked up for each row."""
    made = noted(monkeypatch, DeviceSampler, "__init__", lambda self, *_: self, after=True)
    prompts = mixed_prompts(2)
    config = GenerationConfig(do_sample=True, top_p=0.9, max_new_tokens=6, eos_token_id=3, pad_token_id=0)
    same = generated(device, "llama", prompts, [copy.deepcopy(config) for _ in prompts], steps_per_sync=8)
    assert not made[0].needs_kind
    assert_same_rows([same, generated(device, "llama", prompts, config, steps_per_sync=8)])


def test_bits_are_kept_for_those_with_a_penalty_alone(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    made = noted(monkeypatch, SeatedSampler, "__init__", lambda self, *_: self, after=True)
    prompts = mixed_prompts(2)
    configs = [
        GenerationConfig(max_new_tokens=4, repetition_penalty=1.0 if at % 5 else 1.3) for at in range(len(prompts))
    ]
    generated(device, "llama", prompts, configs, steps_per_sync=4)
    assert made[0]._seen is not None
    assert len(made[0]._seen) == sum(at % 5 == 0 for at in range(len(prompts)))


def test_what_ends_requests_is_known_by_seat() -> None:
    sets = [frozenset({3, 5}), frozenset(), frozenset({5}), frozenset({3, 5})]
    seats = Seats.of(sets, torch.device("cpu"))
    seats.store(torch.tensor([0, 1, 2, 3]), torch.tensor([3, 3, 3, -1]))
    assert seats.ended.tolist() == [True, False, False, False, False]
    seats.store(torch.tensor([3, 2, 1]), torch.tensor([5, 5, 5]))
    assert seats.ended.tolist() == [True, False, True, True, False]
    assert Seats.of(sets[:1] * 9, torch.device("cpu")).which is None
    assert not Seats.of([frozenset()] * 2, torch.device("cpu")).any_eos
    assert not Seats.of([], torch.device("cpu")).any_eos


@pytest.mark.gpu
def test_one_that_needs_the_host_is_named_once() -> None:
    prompts = mixed_prompts(1)
    configs = [GenerationConfig(max_new_tokens=3, temperature=0.6, do_sample=True) for _ in prompts]
    configs[2] = GenerationConfig(max_new_tokens=3, do_sample=True, top_h=0.5, top_p=0.9)
    with BatchGenerator(model_on("cuda", "llama")) as generator, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            generator.generate(prompts, configs, seed=1)
    said = [str(each.message) for each in told if "`top_h`" in str(each.message)]
    assert len(said) == 1 and "all prompts" in said[0]
    assert AHEAD == [False, False]


@pytest.mark.gpu
def test_a_mixed_batch_draws_what_it_should_native() -> None:
    """Rows of many kinds in the same launches, each kind against its own distribution, over a large vocabulary."""
    from support_distributions import processors_of
    from support_rare_tokens import VOCABULARY, Forgetful, assert_follows

    forgetful = Forgetful("cuda")
    kinds: list[dict[str, Any]] = [
        {"top_k": 0},
        {"top_k": 0, "temperature": 0.7},
        {"top_k": 500, "temperature": 1.4},
        {"top_k": 0, "top_p": 0.8},
        {"top_k": 2000, "top_p": 0.9, "min_p": 1e-4},
        {"top_k": 0, "min_p": 1e-3},
    ]
    configs = [GenerationConfig(do_sample=True, max_new_tokens=300, **options) for options in kinds]
    configs.append(GenerationConfig(do_sample=False, max_new_tokens=300))
    prompts = [[at, 7, 9][: 1 + at % 3] for at in range(100 * len(configs))]
    each = [copy.copy(configs[at % len(configs)]) for at in range(len(prompts))]
    for config in each:
        config.num_return_sequences = 10 if config.do_sample else 1
    with BatchGenerator(forgetful.model, steps_per_sync=8, page_size=16) as generator:
        result = list(generator.generate(prompts, each, seed=4))
    assert AHEAD == [True]
    for number, options in enumerate(kinds):
        tokens = [row.token_ids for row in result if row.index % len(configs) == number]
        counts = np.bincount(np.concatenate(tokens), minlength=VOCABULARY)
        assert counts.sum() == 100 * 10 * 300
        warpers = processors_of(build("llama"), 1, **options)
        scores = warpers(torch.zeros(1, 1, dtype=torch.long), forgetful.logits[None])
        probability = scores[0].softmax(0).numpy()
        kept = probability > 0
        assert not counts[~kept].any(), options
        assert_follows(probability[kept], counts[kept])
    best = int(forgetful.logits.argmax())
    greedy = [row.token_ids for row in result if row.index % len(configs) == len(kinds)]
    assert all(tokens == [best] * 300 for tokens in greedy)
