"""That a draw follows the distribution of ``generate`` exactly, with noise that belongs to its place and nothing else.

Seeds are fixed, so nothing here is left to chance; a statistic may be as far out as once in a thousand.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from families import build, random_prompts
from harness import pages_of_memory, reference
from harness import watched as watched  # a fixture
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList, set_seed
from transformers.generation import logits_process as processors

from hf_batchllm import BatchGenerator, BatchResult, PromptError, sampling
from hf_batchllm.options import resolve_options
from hf_batchllm.request import Request
from hf_batchllm.sampling import Sampler, draw, philox, uniforms
from hf_batchllm.scheduler import FifoScheduler

FAMILY = "llama"
SIDES = 3.09  # standard deviations: once in a thousand on each side
LARGE = 262_144


def brief(options: Any) -> str:
    """For the names of tests."""
    return str({name: value for name, value in options.items() if name != "eos_token_id"}) or "defaults"


def prompts(kind: str = "mixed", count: int = 14) -> list[list[int]]:
    return random_prompts(random.Random(3), 97, kind, count)


@pytest.fixture(scope="module")
def generator() -> BatchGenerator:
    return BatchGenerator(build(FAMILY), min_shared_tokens=4, page_size=8)


# -- what must come out ----------------------------------------------------------------------------------------


def processors_of(model: Any, prompt_tokens: int, **options: Any) -> LogitsProcessorList:
    """Those that ``generate`` would use for a prompt of this length, prepared as it does."""
    config, _ = model._prepare_generation_config(None, **({"do_sample": True} | options))
    if config.min_new_tokens is not None:
        config.min_length = prompt_tokens + config.min_new_tokens
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device="cpu")
    return model._get_logits_processor(config, input_ids_seq_length=prompt_tokens, device="cpu", model_kwargs={})


@torch.no_grad()
def distribution(tokens: Sequence[int], prompt_tokens: int, **options: Any) -> np.ndarray:  # [vocabulary]
    """What ``generate`` draws from after these tokens, of which the first are the prompt."""
    model: Any = build(FAMILY)
    ids = torch.tensor([list(tokens)])
    scores = processors_of(model, prompt_tokens, **options)(ids, model(ids).logits[:, -1].float())
    return scores.double().softmax(dim=-1)[0].numpy()


def expected_token(scores: torch.Tensor, uniform: float) -> int:
    """By the book: the first token, in the order of the vocabulary, up to which there is more than ``uniform``."""
    reached = scores.double().softmax(dim=-1).cumsum(dim=-1).numpy()
    return int(np.searchsorted(reached, uniform * reached[-1], side="right"))


def critical_value(freedom: int, sides: float) -> float:
    """Of chi-square, after Wilson and Hilferty."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + sides * spread**0.5) ** 3


def assert_drawn_from(expected: np.ndarray, drawn: Sequence[int]) -> None:
    """Chi-square on both sides: too far from the distribution is wrong, and so is too close to it."""
    counts = np.bincount(drawn, minlength=len(expected))
    assert not counts[expected == 0].any(), "a token without probability was drawn"
    order = np.argsort(expected)
    expected, counts = expected[order] * len(drawn), counts[order]
    bins = np.cumsum(expected) // 8  # the rare ones together, eight to a bin
    wanted = np.bincount(bins.astype(int), expected)
    found = np.bincount(bins.astype(int), counts)[wanted > 5]
    wanted = wanted[wanted > 5]
    found, wanted = np.append(found, len(drawn) - found.sum()), np.append(wanted, len(drawn) - wanted.sum())
    found, wanted = found[wanted > 0.5], wanted[wanted > 0.5]
    freedom = len(wanted) - 1
    if freedom < 1:
        return
    statistic = ((found - wanted) ** 2 / wanted).sum()
    assert statistic < critical_value(freedom, SIDES), f"{statistic} with {freedom} degrees of freedom"
    assert freedom < 5 or statistic > critical_value(freedom, -SIDES)


# -- the distribution, end to end ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {},  # generate's default of top_k=50
        {"top_k": 0, "temperature": 0.5},
        {"top_k": 0, "temperature": 2.5},
        {"top_k": 5},
        {"top_k": 0, "top_p": 0.8},
        {"top_k": 0, "min_p": 0.08},
        {"top_k": 0, "repetition_penalty": 1.6},
        {"top_k": 12, "top_p": 0.9, "temperature": 1.7, "repetition_penalty": 1.2},
        {"top_k": 30, "min_p": 0.02, "temperature": 2.0},
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options", [{"top_k": 7}, {"top_k": 0, "top_p": 0.9, "temperature": 2.0}, {"repetition_penalty": 1.3}], ids=brief
)
def test_each_token_is_the_one_that_its_logits_and_noise_ask_for(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    model: Any = build(FAMILY) if dtype == torch.float32 else copy.deepcopy(build(FAMILY)).to(dtype)
    original, seen = Sampler.__call__, 0

    def checked(self: Sampler, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        nonlocal seen
        assert logits.dtype == torch.float32  # what generate gives to its processors, whatever the model's dtype
        before = logits.clone()
        tokens = original(self, logits, requests)
        assert torch.equal(logits, before)  # a hook may have kept them
        noise = uniforms(9, requests)
        for row, request in enumerate(requests):
            ids = torch.tensor([request.tokens(0, request.length).tolist()])
            scores = processors_of(model, len(request.prompt_ids), **options)(ids, logits[row : row + 1])[0]
            assert tokens[row] == expected_token(scores, noise[row])
            seen += 1
        return tokens

    monkeypatch.setattr(Sampler, "__call__", checked)
    BatchGenerator(model).generate(prompts(), do_sample=True, max_new_tokens=6, seed=9, **options)
    assert seen == 6 * 14


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
    monkeypatch.setattr(sampling, "_invert", lambda weights, uniform: weights.argmax(dim=-1))
    given = prompts()
    options = {"do_sample": True, "max_new_tokens": 12, **options}
    result = generator.generate(given, seed=1, **options)
    model: Any = build(FAMILY)
    for prompt, generation in zip(given, result, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        assert generation.token_ids == out[0, len(prompt) :].tolist()


# -- what noise belongs to -------------------------------------------------------------------------------------


class Shuffled(FifoScheduler):
    def __repr__(self) -> str:
        return "shuffled"  # in the names of tests, which every process must make alike

    def _ordered(self, requests: Sequence[Request]) -> list[Request]:
        return random.Random(8).sample(list(requests), len(requests))


def sampled(given: Any, seed: int | None = 11, config: dict[str, Any] | None = None, **options: Any) -> BatchResult:
    options = {"do_sample": True, "max_new_tokens": 8, "temperature": 2.0, "top_k": 0, **options}
    return BatchGenerator(build(FAMILY), **(config or {})).generate(given, seed=seed, **options)


@cache
def usual() -> list[list[int]]:
    """Three samples of each of the prompts, row 3 * i + j."""
    return sampled(prompts(), num_return_sequences=3).token_ids


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


# -- inverting the distribution function -----------------------------------------------------------------------


def share(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """How much of (0, 1) draws each of ``tokens``, found by bisection."""
    rows = scores.expand(len(tokens), -1)

    def boundary(reach: torch.Tensor) -> torch.Tensor:
        low, high = torch.zeros(len(tokens), dtype=torch.float64), torch.ones(len(tokens), dtype=torch.float64)
        for _ in range(52):
            middle = (low + high) / 2
            below = torch.tensor(draw(rows, middle, [])) < reach
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high

    return boundary(tokens + 1) - boundary(tokens)


def shaped(kind: str, vocabulary: int) -> torch.Tensor:  # [vocabulary]
    noise = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    if kind == "flat":
        return noise * 0.3
    if kind == "normal":
        return noise * 3
    assert kind == "peaked"  # nearly all of the mass in one token, a long tail below 1e-9
    noise[vocabulary // 3] = 20
    return noise


@pytest.mark.parametrize(
    ("kind", "vocabulary"),
    [
        *((kind, size) for kind in ("flat", "normal", "peaked") for size in (40, 1537)),
        ("flat", LARGE),
        ("peaked", LARGE),
    ],
)
def test_each_token_has_its_exact_share_of_the_noise(kind: str, vocabulary: int) -> None:
    scores = shaped(kind, vocabulary)
    probabilities = scores.double().softmax(dim=-1)
    order = probabilities.argsort()
    # The rarest, the most likely, and the first and the last of the vocabulary and of blocks of it.
    tokens = torch.cat([order[:6], order[-3:], torch.tensor([0, 1, vocabulary - 2, vocabulary - 1])])
    if vocabulary > 1000:
        tokens = torch.cat([tokens, torch.tensor([511, 512, 513, 1023, 1024])])
    found = share(scores, tokens)
    # What is left of 1 near its end has steps of 2 ** -53.
    assert ((found - probabilities[tokens]).abs() < 1e-5 * probabilities[tokens] + 4 * 2.0**-53).all()


@pytest.mark.parametrize("kind", ["flat", "peaked"])
@pytest.mark.parametrize("options", [{"top_k": 0, "temperature": 0.7}, {"top_k": 500}], ids=brief)
def test_a_large_vocabulary_is_drawn_from_evenly(kind: str, options: dict[str, Any]) -> None:
    scores = shaped(kind, LARGE)
    scores[scores == 20] = 9  # a third of the mass or so
    processed = processors_of(large_model(), 1, **options)(torch.zeros(1, 1, dtype=torch.long), scores[None])[0]
    probabilities = processed.double().softmax(dim=-1)
    drawn = np.array(sampler(5, **options)(scores.expand(2000, -1), requests_of(2000)))
    assert (probabilities[drawn] > 0).all()
    for buckets in (np.arange(LARGE) // 4096, np.arange(LARGE) % 64, probabilities.argsort().argsort().numpy() // 4096):
        assert_drawn_from(np.bincount(buckets, probabilities.numpy()), buckets[drawn])


@cache
def large_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=LARGE, **sizes))


def sampler(seed: int | None, model: Any = None, **options: Any) -> Sampler:
    model = model or large_model()
    options = {"do_sample": seed is not None, "max_new_tokens": 50, **options}
    return Sampler(model, resolve_options(model, None, options), seed)


def requests_of(count: int, lengths: Sequence[tuple[int, int]] = ((3, 0),), vocabulary: int = 97) -> list[Request]:
    """Requests with so many tokens in the prompt and so many new ones, in turn."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(count):
        prompt, new = lengths[index % len(lengths)]
        request = Request(index, rng.integers(0, vocabulary, prompt).astype(np.int32), 50)
        request.generated = rng.integers(0, vocabulary, new).tolist()
        made.append(request)
    return made


def test_rows_with_next_to_nothing_to_draw_from() -> None:
    masked = torch.full((6, 3000), -torch.inf)
    masked[0, 2999] = -4.0  # one token
    masked[1, 0] = 1e30
    masked[2, [700, 1800]] = 5.0  # a tie
    masked[3, :] = 0.0  # nothing but ties
    masked[4, [3, 4]] = torch.tensor([0.0, -200.0])  # the other one is beyond float32
    masked[5, 1000:] = shaped("normal", 2000)
    # Noise is never 0 or 1, but what is left of it within a block may be.
    ends = [0.0, 2.0**-53, 0.25, 0.4999, 0.5001, 0.75, 1 - 2.0**-53, 1.0]
    every = [[processors.TopKLogitsWarper(50)], [processors.TopPLogitsWarper(0.9)], [processors.MinPLogitsWarper(0.1)]]
    for warpers in ([], [processors.TemperatureLogitsWarper(1e-3)], *every):
        for uniform in ends:
            drawn = draw(masked, torch.full((6,), uniform, dtype=torch.float64), warpers)
            assert drawn[:2] == [2999, 0]
            assert drawn[2] == (700 if uniform < 0.5 else 1800)
            assert drawn[4] == 3
            assert all(masked[row, token] > -torch.inf for row, token in enumerate(drawn))
    assert draw(masked[3:4], torch.tensor([0.50001], dtype=torch.float64), []) == [1500]


def test_a_temperature_close_to_zero_is_greedy() -> None:
    scores = shaped("normal", LARGE).expand(64, -1)
    drawn = sampler(3, temperature=1e-3, top_k=0)(scores, requests_of(64))
    assert set(drawn) == {int(scores[0].argmax())}
    assert sampler(None)(scores, requests_of(64)) == drawn


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("warper", [None, processors.TopKLogitsWarper(2), processors.TopPLogitsWarper(0.5)])
def test_logits_that_are_not_numbers_are_not_drawn_from(bad: float, warper: Any) -> None:
    scores = torch.randn(3, 3000)
    scores[1, :] = bad
    if bad != -float("inf"):
        scores[1, 1:] = 0.0
    with pytest.raises(RuntimeError, match="not numbers"):
        draw(scores, torch.full((3,), 0.5, dtype=torch.float64), [warper] if warper else [])


# -- the best scores instead of all ----------------------------------------------------------------------------


def rows_of_all_kinds() -> Iterator[tuple[str, torch.Tensor]]:
    """[8, 20000] each."""
    noise = torch.randn(8, 20_000, generator=torch.Generator().manual_seed(1))
    yield "flat", noise * 0.5
    yield "normal", noise * 4
    yield "peaked", torch.where(noise > 3, noise * 6, noise)
    yield "masked", torch.where(noise > 2, noise, -torch.inf)
    yield "ties", (noise * 4).bfloat16().float()
    yield "many ties", (noise * 2).round()
    yield "equal", torch.zeros(8, 20_000)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"top_k": 50, "temperature": 0.6, "top_p": 0.9},
        {"top_k": 3000, "temperature": 3.0},
        {"top_k": 0, "top_p": 0.9},
        {"top_k": 0, "top_p": 0.3, "temperature": 1.4},
        {"top_k": 0, "top_p": 0.0},
        {"top_k": 0, "min_p": 0.05},
        {"top_k": 0, "min_p": 1.0},
        {"top_k": 0, "min_p": 0.0},
        {"top_k": 0, "top_p": 0.95, "min_p": 0.1},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 0.8},
    ],
    ids=brief,
)
def test_a_shortlist_leaves_what_the_whole_vocabulary_would(options: dict[str, Any]) -> None:
    warpers = processors_of(large_model(), 1, **options)
    noise = torch.rand(8, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sure = 0
    for name, scores in rows_of_all_kinds():
        expected = warpers(torch.zeros(8, 1, dtype=torch.long), scores)
        # Which of several equals stay at the edge of a nucleus is anybody's guess, also in transformers.
        comparable = "top_p" not in options or name not in ("ties", "many ties", "equal")
        for width in (60, 1024, 10_000):
            ids, short, certain = sampling._shortlist(scores, warpers, width)
            found = torch.full_like(scores, -torch.inf).scatter(-1, ids, short)
            if not comparable:
                found, expected = found.sort().values, expected.sort().values
            assert torch.equal(found[certain], expected[certain]), (name, width)
            assert not certain[(expected > -torch.inf).sum(dim=-1) > width].any()
            sure += int(certain.sum())
        if comparable:
            drawn = np.array([draw(scores, uniform, warpers) for uniform in noise.T])
            for row in range(8):
                assert drawn[:, row].tolist() == [
                    expected_token(expected[row], uniform.item()) for uniform in noise[row]
                ]
    assert sure or options.get("min_p") == 0


def test_a_shortlist_that_is_too_short_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[tuple[int, int]] = []
    attempt = sampling._attempt

    def watched_attempt(scores: torch.Tensor, uniform: torch.Tensor, warpers: Any, width: int) -> torch.Tensor:
        widths.append((width, len(scores)))
        return attempt(scores, uniform, warpers, width)

    monkeypatch.setattr(sampling, "_attempt", watched_attempt)
    rows = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(1))
    rows[:2] *= 8  # two with a small nucleus
    rows[3, :500] = 30  # 500 equals are the whole of it
    noise = torch.full((4,), 0.3, dtype=torch.float64)
    draw(rows, noise, [processors.TopPLogitsWarper(0.9011)])
    assert widths == [(1024, 4), (16384, 1)]
    widths.clear()
    draw(rows, noise, [processors.TopPLogitsWarper(0.9)])  # 450 of 500: rounding decides, so transformers does
    assert widths == [(1024, 4), (16384, 2), (262144, 1)]
    widths.clear()
    draw(rows, noise, [processors.TopKLogitsWarper(50)])
    assert widths == [(114, 4), (1824, 1)]
    widths.clear()
    draw(rows, noise, [])
    assert [rows for _, rows in widths] == [4]


# -- processors that look back ---------------------------------------------------------------------------------


class Discouraging(LogitsProcessor):
    """Of a kind that ``Sampler`` does not know: it looks at the last token, and works in place."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[torch.arange(len(scores)), input_ids[:, -1]] -= 5
        return scores


HISTORIES = ((1, 0), (7, 1), (30, 2), (4, 9), (30, 0), (12, 20))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.5, "min_new_tokens": 2, "eos_token_id": [3, 1, 500, 101]},
        {"min_new_tokens": 10, "eos_token_id": 5},
        {"min_length": 31, "eos_token_id": [5, 6], "repetition_penalty": 2.0},
        {"min_length": 31, "min_new_tokens": 1, "eos_token_id": [5, 6]},
        {"min_new_tokens": 10, "eos_token_id": 1000},
        {"min_new_tokens": 10, "eos_token_id": None},
        {},
    ],
    ids=brief,
)
@pytest.mark.parametrize("extra", [False, True], ids=["", "and one that needs each row by itself"])
def test_rows_of_different_lengths_are_processed_as_each_by_itself(
    options: dict[str, Any], extra: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = build(FAMILY)
    if extra:
        made = sampling.make_processors

        def with_another(*args: Any) -> LogitsProcessorList:
            return LogitsProcessorList([*made(*args), Discouraging()])

        monkeypatch.setattr(sampling, "make_processors", with_another)
    logits = torch.randn(24, 101, generator=torch.Generator().manual_seed(4)) * 3
    before = logits.clone()
    some = requests_of(24, HISTORIES)
    found = sampler(None, model, **options)._with_history(logits, some)
    assert torch.equal(logits, before)
    for row, request in enumerate(some):
        ids = torch.tensor([request.tokens(0, request.length).tolist()])
        every = processors_of(model, len(request.prompt_ids), **{"do_sample": False, **options})
        every = [*every, Discouraging()] if extra else every
        expected = LogitsProcessorList(every)(ids, before[row : row + 1].clone())
        assert torch.equal(found[row], expected[0])


def test_a_penalty_that_spares_a_part_of_the_prompt_goes_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    penalty = processors.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2)
    monkeypatch.setattr(sampling, "make_processors", lambda *_: LogitsProcessorList([penalty]))
    logits, some = torch.randn(6, 101), requests_of(6, ((5, 0), (9, 3)))
    found = sampler(None, build(FAMILY))._with_history(logits, some)
    for row, request in enumerate(some):
        ids = torch.tensor([request.tokens(0, request.length).tolist()])
        assert torch.equal(found[row], penalty(ids, logits[row : row + 1])[0])


def test_one_processor_for_all_rows_gives_what_it_gives_to_one() -> None:
    """Those that ``Sampler`` takes to be blind to what came before, and to other rows."""
    ids, device = torch.tensor([3, 9]), "cpu"
    blind = [
        processors.TemperatureLogitsWarper(0.7),
        processors.TopHLogitsWarper(0.5),
        processors.TopKLogitsWarper(9),
        processors.TopPLogitsWarper(0.8),
        processors.MinPLogitsWarper(0.1),
        processors.TypicalLogitsWarper(0.7),
        processors.EpsilonLogitsWarper(0.01),
        processors.EtaLogitsWarper(0.01, device=device),
        processors.SuppressTokensLogitsProcessor(ids, device=device),
        processors.InfNanRemoveLogitsProcessor(),
        processors.LogitNormalization(),
    ]
    assert {type(processor) for processor in blind} == set(sampling._BLIND_TO_HISTORY)
    scores = torch.randn(7, 200, generator=torch.Generator().manual_seed(4)) * 3
    for processor in blind:
        together = sampling._run([processor], scores)
        for row in range(7):
            alone = processor(torch.randint(200, (1, 30)), scores[row : row + 1])
            torch.testing.assert_close(together[row], alone[0])


def test_greedy_takes_the_lowest_of_equals() -> None:
    scores = torch.zeros(3, LARGE)
    scores[1, [70_000, 200_000]] = 1.0
    assert sampler(None)(scores, requests_of(3)) == [0, 70_000, 0]
    prompt = prompts()[0]
    tokens, _ = reference(FAMILY, tuple(prompt), 8)
    assert BatchGenerator(build(FAMILY)).generate([prompt], max_new_tokens=8)[0].token_ids == tokens


# -- noise -----------------------------------------------------------------------------------------------------


def test_philox_gives_its_published_numbers() -> None:
    counters = np.array(
        [[0] * 4, [0xFFFFFFFF] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]], dtype=np.uint64
    ).T
    expected = {
        0: "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        2**64 - 1: "408f276d 41c83b0e a20bc7c6 6d5451fd",
        0x299F31D0A4093822: "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for row, (key, words) in enumerate(expected.items()):
        assert " ".join(f"{int(word[row]):08x}" for word in philox(counters, key)) == words


def places(indices: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> list[Request]:
    """In this order, the positions running fastest."""
    made, prompt = [], np.array([1], dtype=np.int32)
    for index in indices:
        for sample in samples:
            for position in positions:
                request = Request(index, prompt, 10_000, sample=sample)
                request.generated = [0] * position
                made.append(request)
    return made


@pytest.mark.parametrize("bits", [0, 0xFFFFFFFF])
def test_noise_is_never_0_or_1(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "philox", lambda counter, key: np.full_like(counter, bits))
    (uniform,) = uniforms(1, places([0], [0], [0]))
    assert 0 < uniform < 1
    for scores in (torch.zeros(1, 5), torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]), torch.randn(1, 5000)):
        (token,) = draw(scores, torch.tensor([uniform]), [])
        assert scores[0, token] > -torch.inf


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


# -- on a device -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 0, "top_p": 0.9},
        {"top_k": 0, "min_p": 0.05},
        {"repetition_penalty": 1.3, "min_new_tokens": 3, "eos_token_id": [5, 6]},
    ],
    ids=brief,
)
def test_a_device_draws_the_same_and_is_waited_for_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(64, LARGE, generator=torch.Generator().manual_seed(4)) * 6
    some = requests_of(64, HISTORIES)
    expected = sampler(5, **options)(logits, some)
    onto = sampler(5, copy.deepcopy(large_model()).cuda(), **options)
    there = logits.cuda()
    assert onto(there, some) == expected  # and warms up
    waits = 0
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> list[Any]:
        nonlocal waits
        waits += 1
        torch.cuda.set_sync_debug_mode("default")
        try:
            return tolist(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert onto(there, some) == expected
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits == 1
