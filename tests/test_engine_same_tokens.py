"""One list, one meaning: graphs, steps on their way, sharing and fused layers change no token.

And in bad weather: rows that end at any step, one that outlives all others, memory for a twentieth of the list, streams
and calls that are left while steps are on their way. Of settings every combination is run on a GPU, on a CPU (over the
kernels' references) a part in which each pair meets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import random
from itertools import islice
from typing import Any

import pytest
import torch
from support_calls import answers
from support_device_loop import assert_adds_up, assert_best, assert_same_rows, model_on
from support_device_loop import device as device  # a fixture
from support_families import FAMILIES, PROMPT_KINDS, build, family_params, random_prompts
from support_interrupts import Stop
from support_kernels import plain
from support_parity import mixed_prompts, pages_of_memory, reference
from support_parity import watched as watched  # a fixture

from hf_batchllm import BatchGenerator, GenerationInterrupted

pytestmark = [plain, pytest.mark.filterwarnings("ignore:decode steps run without CUDA graphs")]
STOPS = list(range(0, 97, 9))
DRAWN: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 0.95, "repetition_penalty": 1.2}


def crowd(count: int, seed: int = 8) -> list[list[int]]:
    """Prompts of every kind, sharers apart from each other."""
    rng = random.Random(seed)
    each = -(-count // len(PROMPT_KINDS))
    prompts = [prompt for kind in PROMPT_KINDS for prompt in random_prompts(rng, 97, kind, each)]
    rng.shuffle(prompts)
    return prompts[:count]


def assert_all_free(caches: list[Any]) -> None:
    assert caches
    assert all(cache.free_pages == cache.num_pages for cache in caches)


# -- rows end at any step --------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize("drawn", [{}, {"seed": 5, **DRAWN}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("family", family_params(["llama", "gemma3"]))
def test_a_storm_of_ends(family: str, drawn: dict[str, Any], device: str, watched: list[Any]) -> None:
    """One token in nine ends an answer; some answers are cut at their limit, in the middle of whatever was launched."""
    prompts, model = crowd(300 if device == "cuda" else 64), model_on(device, family)
    options: dict[str, Any] = {"max_new_tokens": 15, "eos_token_id": STOPS, **drawn}
    results = []
    few = {"max_batch_tokens": 96}  # newcomers enter all the time
    every: list[tuple[int, dict[str, int]]] = [(1, {}), (8, few)]
    if device == "cuda":
        every += [(1, few), (2, {}), (2, few), (7, few), (8, {}), (32, {})]
    for depth, config in every:
        with BatchGenerator(model, steps_per_sync=depth, page_size=16, **config) as generator:
            results.append(generator.generate(prompts, **options))
            assert_adds_up(generator, prompts, results[-1], depth)
        assert_all_free(watched)
        assert_best(device, family, prompts, results[-1], 15, STOPS, **drawn)
    assert_same_rows(results, 0.98)
    reasons = [generation.finish_reason for generation in results[0]]
    assert reasons.count("stop") > reasons.count("length") > 0
    assert results[-1].report.idle_tokens > 0


@pytest.mark.some_cases
@pytest.mark.parametrize("depth", [2, 8, 32])
def test_limits_that_lie_anywhere(depth: int, device: str, watched: list[Any]) -> None:
    """Every prompt may grow to the same length, so each has a limit of its own; nothing runs beyond a known end."""
    prompts = [prompt for prompt in crowd(150 if device == "cuda" else 50) if len(prompt) < 72]
    with BatchGenerator(model_on(device, "llama"), steps_per_sync=depth, page_size=16) as generator:
        result = generator.generate(prompts, max_length=72)
        assert_adds_up(generator, prompts, result, depth)
    limits = [72 - len(prompt) for prompt in prompts]
    assert len(set(limits)) > 20
    assert_best(device, "llama", prompts, result, limits)
    assert_all_free(watched)


# -- one outlives all others -----------------------------------------------------------------------------------


def test_one_long_answer_among_many_short_ones(
    device: str, watched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have next to no room up to ``max_length``: most of each is a prefix that all of them share."""
    others, new_tokens = (500, 4000) if device == "cuda" else (40, 150)
    family = dataclasses.replace(FAMILIES["llama"], config=FAMILIES["llama"].config | {"max_position_embeddings": 8192})
    monkeypatch.setitem(FAMILIES, "llama_long", family)
    model, rng = model_on(device, "llama_long"), random.Random(3)
    longest = 5 + new_tokens
    shared = [rng.randrange(97) for _ in range(longest - 20)]
    prompts = [shared + [rng.randrange(97) for _ in range(10)] for _ in range(others)]
    prompts.insert(others // 3, [1, 2, 3, 4, 5])
    limits = [longest - len(prompt) for prompt in prompts]
    assert sorted(set(limits)) == [10, new_tokens]
    results = []
    for depth in (1, 8):
        with BatchGenerator(model, steps_per_sync=depth) as generator:
            results.append(generator.generate(prompts, max_length=longest))
            assert_adds_up(generator, prompts, results[-1], depth)
        assert_all_free(watched)
    assert_same_rows(results, 0.98)
    some = [others // 3, *range(0, others, others // 20)]
    for result in results:
        assert [len(row) for row in result.token_ids] == limits
        assert_best(device, "llama_long", prompts, [result[at] for at in sorted(set(some))], limits)
    assert results[1].report.steps < 1.1 * new_tokens + 50


# -- memory for a twentieth of the list ------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize("depth", [1, 2, 8])
@pytest.mark.parametrize("family", family_params(["llama", "gemma3"]))
def test_a_cache_that_holds_a_twentieth(family: str, depth: int, device: str, watched: list[Any]) -> None:
    """Prefixes come and go, rows yield their pages with tokens on their way, and come back."""
    if device == "cpu" and (family == "llama") == (depth == 2):
        pytest.skip("a GPU runs every depth with every family, a CPU every other one")
    model, preemptions, recomputed, page = model_on(device, family), 0, 0, 16
    count, new_tokens, seeds = (400, 40, [1, 2]) if device == "cuda" else (36, 24, [depth])
    if (family, depth, device) == ("llama", 8, "cpu"):
        seeds = [1, 2]
    for seed in seeds:
        prompts = crowd(count, seed)
        pages = sum(len(prompt) + new_tokens for prompt in prompts) // (20 * page)
        memory = pages_of_memory(build(family), max(pages, 10), page)
        drawn = {"seed": seed, **DRAWN} if seed % 2 else {}
        config = {"steps_per_sync": depth, "page_size": page, "kv_memory": memory, "min_shared_tokens": 4}
        given = {"max_new_tokens": new_tokens, "eos_token_id": [3, 50], **drawn}
        result = answers(model, prompts, config, **given)
        assert_best(device, family, prompts, result, new_tokens, [3, 50], **drawn)
        assert_all_free(watched)
        assert result.report.peak_memory <= result.report.kv_memory <= memory
        decoded = sum(len(tokens) - 1 for tokens in result.token_ids)
        report = result.report
        assert report.model_tokens == report.computed_tokens + report.recomputed_tokens + decoded + report.idle_tokens
        preemptions += report.preemptions
        recomputed += report.recomputed_tokens
    assert preemptions > 0 and recomputed > 0


# -- left while steps are on their way -------------------------------------------------------------------------


def memory_in_use(device: str) -> int:
    if device == "cpu":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("how", "drawn"), [("close", {}), ("close", {"seed": 5, **DRAWN}), ("del", {"seed": 5, **DRAWN}), ("error", {})]
)
def test_a_stream_that_is_left(how: str, drawn: dict[str, Any], device: str, watched: list[Any]) -> None:
    prompts, model = crowd(40), model_on(device, "llama")
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": STOPS, **drawn}
    with BatchGenerator(model, steps_per_sync=8, page_size=16) as generator:
        result = generator.generate(prompts, **options)  # what is made on first use
    assert_best(device, "llama", prompts, result, 30, STOPS, **drawn)
    before = memory_in_use(device)
    with BatchGenerator(model, steps_per_sync=8, page_size=16) as generator:
        for results in (0, 1, 5, 17, 39) if device == "cuda" else (0, 3):
            stream = generator.stream(prompts, **options)
            some = list(islice(stream, results))
            assert_best(device, "llama", prompts, some, 30, STOPS, **drawn)
            if how == "close":
                stream.close()
            elif how == "error":
                with pytest.raises(ZeroDivisionError):
                    stream.throw(ZeroDivisionError())
            del stream  # and with it, where nobody has closed it, the call
        result = generator.generate(prompts, **options)
        assert_best(device, "llama", prompts, result, 30, STOPS, **drawn)
        assert_adds_up(generator, prompts, result, 8)
    del some, result
    assert memory_in_use(device) == before


GRAPHS = ("decode_graphs.py", "decode_rows.py", "graph_capture.py")
LOOP = (
    "engine/loop.py",
    "run_ahead.py",
    *GRAPHS,
    "triton_attention.py",
    "planning/scheduler.py",
    "engine/call.py",
)


@pytest.mark.some_cases
@pytest.mark.parametrize("depth", [2, 8])
@pytest.mark.parametrize("files", [(), LOOP, GRAPHS], ids=["anywhere", "loop", "graphs"])
def test_an_interrupt_at_any_line(files: tuple[str, ...], depth: int, device: str) -> None:
    """Captures included. The next call is none the worse, on this generator and on a new one."""
    prompts, model = crowd(24), model_on(device, "llama")
    options: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": STOPS}
    with BatchGenerator(model, steps_per_sync=depth, page_size=16) as generator:
        result = generator.generate(prompts, **options)  # what is made on first use
    assert_best(device, "llama", prompts, result, 16, STOPS)
    before = memory_in_use(device)
    with BatchGenerator(model, steps_per_sync=depth, page_size=16) as generator:
        every = Stop(0, files)
        every.during(lambda: generator.generate(prompts, **options))
        assert every.count > 100
        for at in random.Random(depth).sample(range(1, every.count), 10 if device == "cuda" else 2):
            stop = Stop(at, files)
            with contextlib.suppress(GenerationInterrupted):
                stop.during(lambda: generator.generate(prompts, **options))
            result = generator.generate(prompts, **options)
            assert_best(device, "llama", prompts, result, 16, STOPS)
    del result
    assert memory_in_use(device) == before, stop.place


# -- what the host waits for -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [2, 4, 16])
def test_the_host_waits_for_nothing_but_tokens_of_drawn_rows(depth: int) -> None:
    """From the first result to the second, fifty steps later: what was captured for one row more still serves."""
    rng = random.Random(7)
    prompts = [[rng.randrange(97) for _ in range(length)] for length in (60, *[10] * 39)]
    options: dict[str, Any] = {"do_sample": True, "seed": 1, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}
    options |= {"max_length": 110, "min_new_tokens": 200, "eos_token_id": STOPS}
    with BatchGenerator(model_on("cuda", "llama"), steps_per_sync=depth, page_size=16) as generator:
        whole = generator.generate(prompts, **options)  # what is compiled on first use
        stream = generator.stream(prompts, **options)
        some = [next(stream)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            some.append(next(stream))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        some += stream
        assert generator.last_report is not None and generator.last_report.graphs
    assert len(some[0].token_ids) == 50 and {len(generation.token_ids) for generation in some[1:]} == {100}
    assert [generation.token_ids for generation in sorted(some, key=lambda each: each.index)] == whole.token_ids


# -- every setting ---------------------------------------------------------------------------------------------

SETTLED = ["llama", "qwen3", "mistral", "qwen2", "gemma3", "gpt_oss"]
NOT_CAPTURED = ("gpt_oss",)  # its experts' own code may be some that a graph cannot hold, which is then said
DEPTHS = [1, 2, 8, 32]
SWITCHES = ("cuda_graphs", "share_prefixes", "fuse")
SOME_STOPS = list(range(0, 97, 16))
# Each with what a step needs besides the noise: nothing, and what depends on all that a row has had.
ALL_DRAWN: list[dict[str, Any]] = [
    {"do_sample": True, "top_k": 0, "temperature": 1.3},
    {"do_sample": True, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3, "min_new_tokens": 4},
]


def settings_of(device: str, family: str, depth: int) -> list[dict[str, bool]]:
    every = [dict(zip(SWITCHES, values, strict=True)) for values in itertools.product([True, False], repeat=3)]
    if device == "cuda":
        return every
    some = (SETTLED.index(family) + DEPTHS.index(depth)) % 4
    return [every[some], every[7 - some]]  # all three the other way round


@pytest.mark.some_cases
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("family", family_params(SETTLED))
def test_every_setting_gives_the_same_tokens(family: str, depth: int, device: str, watched: list[Any]) -> None:
    if device == "cpu" and (SETTLED.index(family) + DEPTHS.index(depth)) % 2:
        pytest.skip("a GPU runs every depth with every family, a CPU every other one")
    prompts, model = mixed_prompts(1), model_on(device, family)
    new_tokens = max(16, depth + 4)  # more than what is on its way at a time
    drawn = ALL_DRAWN[DEPTHS.index(depth) % 2]
    greedy_results, drawn_results = [], []
    for switches in settings_of(device, family, depth):
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": SOME_STOPS}
        with BatchGenerator(model, steps_per_sync=depth, page_size=16, min_shared_tokens=4, **switches) as generator:
            greedy_results.append(generator.generate(prompts, **options))
            drawn_results.append(generator.generate(prompts, seed=3, **options, **drawn))
            for result in (greedy_results[-1], drawn_results[-1]):
                assert_adds_up(generator, prompts, result, depth)
                if switches["fuse"] or family not in NOT_CAPTURED:
                    assert bool(result.report.graphs) == switches["cuda_graphs"]
        assert all(cache.free_pages == cache.num_pages for cache in watched)
    for result in greedy_results:
        assert_best(device, family, prompts, result, new_tokens, SOME_STOPS)
    for result in drawn_results:
        assert_best(device, family, prompts, result, new_tokens, SOME_STOPS, seed=3, **drawn)
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
    prompts, model, drawn = mixed_prompts(1), model_on(device, family), ALL_DRAWN[0]
    options: dict[str, Any] = {"max_new_tokens": 20, "num_return_sequences": 5, **drawn}
    with BatchGenerator(model, steps_per_sync=8, page_size=16) as generator:
        whole = generator.generate(prompts, seed=2**63 + 11, **options)
        part = generator.generate(prompts[:4], seed=2**63 + 11, **options)
    seed = 11 - 2**63  # the same 64 bits
    assert_best(device, family, prompts, whole, 20, seed=seed, **drawn)
    assert_best(device, family, prompts, part, 20, seed=seed, **drawn)
    same = sum(a == b for a, b in zip(part.token_ids, whole.token_ids[: len(part)], strict=True))
    assert same >= len(part) - 1
    assert len({tuple(row) for row in whole.token_ids}) == len(whole)
