"""One list, one meaning: graphs, steps on their way, sharing and fused layers change no token.

On a GPU every combination is run, on a CPU (over the kernels' twins) a part in which each pair of settings meets.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support_device_loop import assert_adds_up, assert_best, assert_same_rows, model_on
from support_device_loop import device as device  # a fixture
from support_families import family_params
from support_kernels import plain
from support_parity import mixed_prompts, reference
from support_parity import watched as watched  # a fixture

from hf_batchllm import BatchGenerator

pytestmark = [plain, pytest.mark.filterwarnings("ignore:decode steps run without CUDA graphs")]

FAMILIES = ["llama", "qwen3", "mistral", "qwen2", "gemma3", "gpt_oss"]
NOT_CAPTURED = ("gpt_oss",)  # its experts' own code may be some that a graph cannot hold, which is then said
DEPTHS = [1, 2, 8, 32]
SWITCHES = ("cuda_graphs", "share_prefixes", "fuse")
STOPS = list(range(0, 97, 16))
# Each with what a step needs besides the noise: nothing, and what depends on all that a row has had.
DRAWN: list[dict[str, Any]] = [
    {"do_sample": True, "top_k": 0, "temperature": 1.3},
    {"do_sample": True, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3, "min_new_tokens": 4},
]


def settings_of(device: str, family: str, depth: int) -> list[dict[str, bool]]:
    every = [dict(zip(SWITCHES, values, strict=True)) for values in itertools.product([True, False], repeat=3)]
    if device == "cuda":
        return every
    some = (FAMILIES.index(family) + DEPTHS.index(depth)) % 4
    return [every[some], every[7 - some]]  # all three the other way round


@pytest.mark.some_cases
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("family", family_params(FAMILIES))
def test_every_setting_gives_the_same_tokens(family: str, depth: int, device: str, watched: list[Any]) -> None:
    if device == "cpu" and (FAMILIES.index(family) + DEPTHS.index(depth)) % 2:
        pytest.skip("a GPU runs every depth with every family, a CPU every other one")
    prompts, model = mixed_prompts(1), model_on(device, family)
    new_tokens = max(16, depth + 4)  # more than what is on its way at a time
    drawn = DRAWN[DEPTHS.index(depth) % 2]
    greedy_results, drawn_results = [], []
    for switches in settings_of(device, family, depth):
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": STOPS, "progress": False}
        with BatchGenerator(model, steps_per_sync=depth, page_size=16, min_shared_tokens=4, **switches) as generator:
            greedy_results.append(generator.generate(prompts, **options))
            drawn_results.append(generator.generate(prompts, seed=3, **options, **drawn))
            for result in (greedy_results[-1], drawn_results[-1]):
                assert_adds_up(generator, prompts, result, depth)
                if switches["fuse"] or family not in NOT_CAPTURED:
                    assert bool(result.report.graphs) == switches["cuda_graphs"]
        assert all(cache.free_pages == cache.num_pages for cache in watched)
    for result in greedy_results:
        assert_best(device, family, prompts, result, new_tokens, STOPS)
    for result in drawn_results:
        assert_best(device, family, prompts, result, new_tokens, STOPS, seed=3, **drawn)
    assert_same_rows(greedy_results)
    assert_same_rows(drawn_results)
    for prompt, generation in list(zip(prompts, greedy_results[0], strict=True))[::4]:
        expected, sure = reference(family, tuple(prompt), new_tokens)
        tokens = generation.token_ids
        assert tokens[:sure] == expected[: min(sure, len(tokens))]


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(["llama", "gemma3"]))
def test_samples_of_a_prompt_have_noise_of_their_own(family: str, device: str, watched: list[Any]) -> None:
    """Whatever row of a step they run in; and the same as if fewer prompts stood in the list behind them."""
    prompts, model, drawn = mixed_prompts(1), model_on(device, family), DRAWN[0]
    options: dict[str, Any] = {"max_new_tokens": 20, "num_return_sequences": 5, "progress": False, **drawn}
    with BatchGenerator(model, steps_per_sync=8, page_size=16) as generator:
        whole = generator.generate(prompts, seed=2**63 + 11, **options)
        part = generator.generate(prompts[:4], seed=2**63 + 11, **options)
    seed = 11 - 2**63  # the same 64 bits
    assert_best(device, family, prompts, whole, 20, seed=seed, **drawn)
    assert_best(device, family, prompts, part, 20, seed=seed, **drawn)
    same = sum(a == b for a, b in zip(part.token_ids, whole.token_ids[: len(part)], strict=True))
    assert same >= len(part) - 1
    assert len({tuple(row) for row in whole.token_ids}) == len(whole)
