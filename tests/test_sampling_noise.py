"""That a draw follows the distribution of ``generate``, with noise that belongs to its place and to nothing else."""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from support_distributions import SIDES, assert_drawn_from, brief, expected_token, processors_of
from support_families import build, reference_generate
from support_host_sampler import noise_for
from support_llama_calls import FAMILY, prompts
from support_llama_calls import generator as generator  # a fixture
from support_parity import pages_of_memory
from support_parity import watched as watched  # a fixture
from transformers import set_seed

from hf_batchllm import BatchGenerator, BatchResult, PromptError
from hf_batchllm.kernels.reference.sample_torch import exponential
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.scheduler import FifoScheduler
from hf_batchllm.sampling import noise as sampling_noise
from hf_batchllm.sampling.host_sampler import HostSampler

# -- the distribution, end to end ------------------------------------------------------------------------------


@torch.no_grad()
def distribution(tokens: Sequence[int], prompt_tokens: int, **options: Any) -> np.ndarray:  # [vocabulary]
    """What ``generate`` draws from after these tokens, of which the first are the prompt."""
    model: Any = build(FAMILY)
    ids = torch.tensor([list(tokens)])
    scores = processors_of(model, prompt_tokens, **options)(ids, model(ids).logits[:, -1].float())
    return scores.double().softmax(dim=-1)[0].numpy()


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"top_k": 0},
        {"top_k": 0, "temperature": 0.5},
        {"top_k": 0, "top_p": 0.8},
        {"top_k": 0, "repetition_penalty": 1.6},
        {"top_k": 12, "top_p": 0.9, "temperature": 1.7, "repetition_penalty": 1.2},
        {"top_k": 0, "top_p": 0.95, "min_p": 0.05, "temperature": 2.0},
        {"top_k": 0, "temperature": 3.0, "min_new_tokens": 2, "eos_token_id": list(range(0, 101, 2))},
    ],
    ids=brief,
)
def test_tokens_follow_the_distribution_of_generate(generator: BatchGenerator, options: dict[str, Any]) -> None:
    prompt = prompts("distinct", 3)[1]
    options = {"max_new_tokens": 2, **options}
    result = generator.generate([prompt], do_sample=True, num_return_sequences=2500, seed=2024, **options)
    first, second = np.array(result.token_ids).T
    assert_drawn_from(distribution(prompt, len(prompt), **options), first)
    common = [int(token) for token in np.unique(first) if (first == token).sum() >= 150]
    assert common
    for token in common:
        expected = distribution([*prompt, token], len(prompt), **options)
        assert_drawn_from(expected, second[first == token])


@pytest.mark.some_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options", [{"top_k": 7}, {"top_k": 0, "top_p": 0.9, "temperature": 2.0}, {"repetition_penalty": 1.3}], ids=brief
)
def test_each_token_is_the_one_that_its_logits_and_noise_ask_for(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    model: Any = build(FAMILY) if dtype == torch.float32 else copy.deepcopy(build(FAMILY)).to(dtype)
    original, seen = HostSampler.without_waiting, 0

    def checked(self: HostSampler, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        nonlocal seen
        assert logits.dtype == torch.float32  # what generate gives to its processors, whatever the model's dtype
        before = logits.clone()
        tokens = original(self, logits, requests)
        assert torch.equal(logits, before)  # a hook may have kept them
        for row, request in enumerate(requests):
            ids = torch.tensor([request.tokens(0, request.length).tolist()])
            scores = processors_of(model, len(request.prompt_ids), **options)(ids, logits[row : row + 1])[0]
            assert tokens[row] == expected_token(scores, 9, request.index, request.sample, len(request.generated))
            seen += 1
        return tokens

    monkeypatch.setattr(HostSampler, "without_waiting", checked)
    BatchGenerator(model).generate(prompts(), do_sample=True, max_new_tokens=6, seed=9, **options)
    assert seen == 6 * 14


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.4},
        {"top_k": 3, "repetition_penalty": 1.5},
        {"top_p": 0.7, "temperature": 1.8},
        {"min_p": 0.2, "top_k": 0},
        {"repetition_penalty": 1.3, "min_new_tokens": 4, "eos_token_id": list(range(50))},
        {"min_length": 12, "eos_token_id": list(range(50))},
    ],
    ids=brief,
)
def test_sampled_calls_match_generate_where_both_draw_the_most_likely(
    monkeypatch: pytest.MonkeyPatch, generator: BatchGenerator, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch, "multinomial", lambda probs, num_samples: probs.argmax(dim=-1, keepdim=True))

    def most_likely(scores: torch.Tensor, keys: torch.Tensor, blocks: Any, ids: torch.Tensor | None) -> torch.Tensor:
        best = scores.argmax(dim=-1, keepdim=True)
        return (best if ids is None else ids.gather(-1, best))[:, 0]

    monkeypatch.setattr(sampling_noise, "draw", most_likely)
    options = {"do_sample": True, "max_new_tokens": 12, **options}
    found = generator.generate(prompts(), seed=1, **options).token_ids
    assert found == [reference_generate(build(FAMILY), prompt, **options) for prompt in prompts()]


# -- what noise belongs to -------------------------------------------------------------------------------------


class Shuffled(FifoScheduler):
    def __repr__(self) -> str:
        return "shuffled"  # in the names of tests, which every process must make alike

    def _ordered(self, requests: Sequence[Request]) -> list[Request]:
        return random.Random(8).sample(list(requests), len(requests))


def sampled(given: Any, seed: Any = 11, config: dict[str, Any] | None = None, **options: Any) -> BatchResult:
    options = {"do_sample": True, "max_new_tokens": 8, "temperature": 2.0, "top_k": 0, **options}
    return BatchGenerator(build(FAMILY), **(config or {})).generate(given, seed=seed, **options)


@cache
def usual() -> list[list[int]]:
    """Three samples of each of the prompts, row 3 * i + j."""
    return sampled(prompts(), num_return_sequences=3).token_ids


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "config",
    [
        {"share_prefixes": False},
        {"min_shared_tokens": 1},
        {"scheduler": "fifo"},
        {"scheduler": Shuffled()},
        {"scheduler": Shuffled(), "share_prefixes": False, "max_batch_tokens": 7},
        {"max_batch_tokens": 1},
        {"max_batch_tokens": 3, "page_size": 2, "min_shared_tokens": 1},
        {"page_size": 1, "max_batch_tokens": 50},
        {"keep_prefixes": 1 << 20},
    ],
    ids=brief,
)
def test_how_the_work_is_cut_and_ordered_changes_no_draw(config: dict[str, Any], watched: list[Any]) -> None:
    assert sampled(prompts(), config=config, num_return_sequences=3).token_ids == usual()


def test_a_preempted_request_comes_back_with_the_same_draws(watched: list[Any]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": 1000}  # one that never comes
    config = {"page_size": 4, "kv_memory": pages_of_memory(build(FAMILY), 40, 4), "min_shared_tokens": 1}
    result = sampled(prompts(), config=config, **options)
    assert result.report.preemptions > 0
    assert result.token_ids == sampled(prompts(), **options).token_ids
    assert [tokens[:8] for tokens in result.token_ids] == usual()[::3]  # the same place, the same noise


def test_noise_belongs_to_the_prompts_place_in_the_list_and_not_to_its_neighbours() -> None:
    given = prompts()
    for left in (1, 5, 13):  # what comes later may be left out
        assert sampled(given[:left], num_return_sequences=3).token_ids == usual()[: 3 * left]
    # Other prompts in the other places, good or bad, change nothing.
    others: list[Any] = [[7, index] for index in range(13)] + [given[13]]
    assert sampled(others, num_return_sequences=3).token_ids[39:] == usual()[39:]
    others[3:6] = [[], [5000], None]
    recorded = sampled(others, num_return_sequences=3, on_error="record")
    assert [generation.finish_reason for generation in recorded[9:18]] == ["error"] * 9
    assert recorded.token_ids[39:] == usual()[39:]
    # In another place the prompt meets other noise: that of the place.
    moved = sampled([[1, 2], *given], num_return_sequences=3).token_ids
    assert all(now != before for now, before in zip(moved[3:], usual(), strict=True))
    swapped = sampled([given[1], given[0], *given[2:]], num_return_sequences=3).token_ids
    assert swapped[6:] == usual()[6:]
    assert all(now != before for now, before in zip(swapped[:6], usual()[:6], strict=True))


def test_a_sample_is_the_same_however_many_there_are() -> None:
    for samples in (1, 2, 5):
        result = sampled(prompts(), num_return_sequences=samples)
        assert [(g.index, g.sample) for g in result] == [(i, j) for i in range(14) for j in range(samples)]
        assert [[g.sample for g in row] for row in result.by_prompt] == [list(range(samples))] * 14
        for generation in result:
            if generation.sample < 3:
                assert generation.token_ids == usual()[3 * generation.index + generation.sample]


def test_samples_duplicates_and_seeds_differ() -> None:
    assert len({tuple(tokens) for tokens in usual()}) == len(usual())
    same = [prompts()[0]] * 8
    result = sampled(same, num_return_sequences=4)
    assert len({tuple(tokens) for tokens in result.token_ids}) == 32
    streams = [sampled(same, seed=seed).token_ids for seed in (0, 1, 2, 1 << 32, 2**64 - 1)]
    assert len({tuple(tokens) for stream in streams for tokens in stream}) == 40


def test_with_seeds_of_their_own_it_does_not_matter_where_prompts_stand() -> None:
    given = prompts()
    seeds = [2**64 - 1 - index // 2 for index in range(len(given))]
    whole = sampled(given, seed=seeds, num_return_sequences=2)
    assert whole.report.seed == seeds
    assert "seed       one for each prompt" in str(whole.report)
    some = [9, 3, 12]
    moved = sampled([given[index] for index in some], seed=np.array([seeds[index] for index in some], dtype=np.uint64))
    assert moved.token_ids == [whole[2 * index].token_ids for index in some]
    assert sampled(given[:1], seed=seeds[0]).token_ids == whole.token_ids[:1]  # the first of a list, as ever
    same = sampled([given[0]] * 3, seed=[5, 6, 5]).token_ids
    assert same[0] == same[2] != same[1]
    options = {"do_sample": True, "max_new_tokens": 6, "top_k": 0}
    streamed = BatchGenerator(build(FAMILY)).stream(given, seed=seeds, **options)
    alone = BatchGenerator(build(FAMILY)).generate(given, seed=seeds, **options)
    assert {each.index: each.token_ids for each in streamed} == dict(enumerate(alone.token_ids))
    assert sampled(given, seed=range(14)).token_ids == sampled(given, seed=list(range(14))).token_ids


# -- seeds and other people's generators -----------------------------------------------------------------------


def states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), rest


def test_with_a_seed_or_without_sampling_no_generator_is_read_or_moved(generator: BatchGenerator) -> None:
    before = states()
    sampled(prompts(), seed=3, repetition_penalty=1.1)
    generator.generate(prompts(), max_new_tokens=3)
    generator.generate(prompts(), max_new_tokens=3, seed=4)
    list(generator.stream(prompts(), max_new_tokens=3, do_sample=True, seed=4))
    generator.plan(prompts())
    with pytest.raises(PromptError):
        sampled([[]], seed=None)
    assert states() == before


def test_without_a_seed_one_is_drawn_and_reported(generator: BatchGenerator) -> None:
    set_seed(42)
    first = sampled(prompts(), seed=None)
    after = states()
    set_seed(42)
    assert int(torch.randint(2**63 - 1, ()).item()) == first.report.seed
    assert states() == after  # that one number, and nothing else
    assert sampled(prompts(), seed=None).token_ids != first.token_ids
    set_seed(42)
    assert sampled(prompts(), seed=None).token_ids == first.token_ids
    assert sampled(prompts(), seed=first.report.seed).token_ids == first.token_ids
    assert sampled(prompts(), seed=np.uint64(2**64 - 1)).report.seed == 2**64 - 1
    assert generator.generate(prompts(), max_new_tokens=2).report.seed is None


# -- noise -----------------------------------------------------------------------------------------------------


def places(indices: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> list[Request]:
    """In this order, the positions running fastest."""
    made, prompt = [], np.array([1], dtype=np.int32)
    for index, sample, position in product(indices, samples, positions):
        made.append(Request(index, prompt, 10_000, sample=sample))
        made[-1].generated = [0] * position
    return made


def uniforms(seed: int, requests: Sequence[Request]) -> np.ndarray:
    """The noise of token 3 at these places, as numbers between 0 and 1."""
    key = noise_for(requests, 10, seed).keys[:, :, None]
    return (-exponential(torch.tensor([3]), *key)).exp()[:, 0].numpy()


def uncorrelated(one: np.ndarray, other: np.ndarray) -> bool:
    return abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < SIDES / one.size**0.5


@pytest.mark.parametrize("seed", [0, 1, 12345, 1 << 32, 2**64 - 1])
def test_noise_is_even_and_independent_from_place_to_place(seed: int) -> None:
    shape = (40, 16, 24)
    some = places(range(shape[0]), range(shape[1]), range(shape[2]))
    noise = uniforms(seed, some).reshape(shape)  # [prompts, samples, positions]
    assert len(np.unique(noise)) == noise.size
    assert_drawn_from(np.full(64, 1 / 64), (noise.ravel() * 64).astype(int))
    assert_drawn_from(np.full(64, 1 / 64), (noise.ravel() * 2**40).astype(np.int64) % 64)
    assert abs(statistics.fmean(noise.ravel()) - 0.5) < SIDES / (12 * noise.size) ** 0.5
    for axis in range(3):
        for apart in (1, 2, 8):
            first, second = np.arange(shape[axis] - apart), np.arange(apart, shape[axis])
            assert uncorrelated(noise.take(first, axis), noise.take(second, axis)), f"axis {axis}, {apart} apart"
    for other in ((seed + 1) % 2**64, (seed - 1) % 2**64, seed ^ (1 << 32), seed ^ (1 << 63)):
        assert uncorrelated(noise, uniforms(other, some).reshape(shape))


def test_the_parts_of_a_place_are_not_mixed_up() -> None:
    numbers = [0, 1, 2, 7]
    noise = uniforms(1, places(numbers, numbers, numbers))
    assert len(np.unique(noise)) == 64
    far = Request(4_000_000_000, np.array([1], dtype=np.int32), 5, sample=3_000_000_000)
    assert uniforms(1, [far]) not in noise
