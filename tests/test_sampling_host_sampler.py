"""From scores to tokens, step by step: draws by the book, shortlists, processors that look back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support_distributions import assert_drawn_from, brief, expected_token, processors_of
from support_families import build
from support_host_sampler import (
    HISTORIES,
    LARGE,
    LOOKING_BACK,
    Discouraging,
    large_model,
    noise_for,
    requests_of,
    sampler,
)
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors

from hf_batchllm.inputs.resolve_options import resolve_options
from hf_batchllm.kernels.reference.sample_torch import gumbel_sample
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.sampling import host_sampler, processor_chains, rows_together
from hf_batchllm.sampling.noise import Noise
from hf_batchllm.sampling.sampling_kernels import triton_sampling

FAMILY = "llama"


# -- draws ----------------------------------------------------------------------------------------------------


def shaped(kind: str, vocabulary: int) -> torch.Tensor:  # [vocabulary]
    noise = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    if kind == "flat":
        return noise * 0.3
    if kind == "normal":
        return noise * 3
    assert kind == "peaked"  # nearly all of the mass in one token, a long tail below 1e-9
    noise[vocabulary // 3] = 20
    return noise


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("kind", "vocabulary"),
    [
        *((kind, size) for kind in ("flat", "normal", "peaked") for size in (1, 40, 2047, 2048, 2049, 6144)),
        ("flat", LARGE),
        ("peaked", LARGE),
    ],
)
def test_a_cpu_draws_what_the_device_draws(kind: str, vocabulary: int) -> None:
    scores, some = shaped(kind, vocabulary), requests_of(20, HISTORIES)
    rows, seed = scores.expand(len(some), -1), 2**64 - 5
    noise = noise_for(some, vocabulary, seed)
    drawn = host_sampler.drawn(rows, noise, []).tolist()
    assert drawn == [expected_token(scores, seed, each.index, 0, len(each.generated)) for each in some]
    assert drawn == gumbel_sample(rows, 1.0, *noise.keys).tolist()
    last = len(some) - 1
    assert host_sampler.drawn(rows[-1:], noise.of([last]), []).tolist() == drawn[-1:]
    # A list of tokens is drawn from as the whole is where all others cannot come.
    ids = rows.topk(min(vocabulary, 100)).indices.sort(dim=-1).values
    cut = torch.full_like(rows, -torch.inf).scatter(-1, ids, rows.gather(-1, ids))
    of_list = noise.token(rows.gather(-1, ids), ids).tolist()
    assert of_list == noise.token(cut).tolist() == gumbel_sample(cut, 1.0, *noise.keys).tolist()


@pytest.mark.parametrize(("kind", "options"), [("flat", {"top_k": 0, "temperature": 0.7}), ("peaked", {"top_k": 500})])
def test_a_large_vocabulary_is_drawn_from_evenly(kind: str, options: dict[str, Any]) -> None:
    scores = shaped(kind, LARGE)
    scores[scores == 20] = 9  # a third of the mass or so
    processed = processors_of(large_model(), 1, **options)(torch.zeros(1, 1, dtype=torch.long), scores[None])[0]
    probabilities = processed.double().softmax(dim=-1)
    drawn = np.array(sampler(5, **options)(scores.expand(2000, -1), requests_of(2000)))
    assert (probabilities[drawn] > 0).all()
    for buckets in (np.arange(LARGE) // 4096, np.arange(LARGE) % 64, probabilities.argsort().argsort().numpy() // 4096):
        assert_drawn_from(np.bincount(buckets, probabilities.numpy()), buckets[drawn])


def test_rows_with_next_to_nothing_to_draw_from() -> None:
    masked = torch.full((6, 3000), -torch.inf)
    masked[0, 2999] = -4.0  # one token
    masked[1, 0] = 1e30
    masked[2, [700, 1800]] = 5.0  # a tie
    masked[3, :] = 0.0  # nothing but ties
    masked[4, [3, 4]] = torch.tensor([0.0, -200.0])  # the other one is beyond float32
    masked[5, 1000:] = shaped("normal", 2000)
    every = [[processors.TopKLogitsWarper(50)], [processors.TopPLogitsWarper(0.9)], [processors.MinPLogitsWarper(0.1)]]
    for warpers in ([], [processors.TemperatureLogitsWarper(1e-3)], *every):
        of_tie = set()
        for seed in range(20):
            drawn = host_sampler.drawn(masked, noise_for(requests_of(6), 3000, seed), warpers).tolist()
            assert drawn[:2] == [2999, 0]
            assert drawn[4] == 3
            assert all(masked[row, token] > -torch.inf for row, token in enumerate(drawn))
            of_tie.add(drawn[2])
        assert of_tie == {700, 1800}


def test_a_temperature_close_to_zero_is_greedy() -> None:
    scores = shaped("normal", LARGE).expand(64, -1)
    drawn = sampler(3, temperature=1e-3, top_k=0)(scores, requests_of(64))
    assert set(drawn) == {int(scores[0].argmax())}
    assert sampler(None)(scores, requests_of(64)) == drawn


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 2}, {"top_k": 0, "top_p": 0.5}], ids=brief)
def test_logits_that_are_not_numbers_are_not_drawn_from(bad: float, options: dict[str, Any]) -> None:
    scores = torch.randn(3, 3000)
    scores[1, :] = bad
    if bad != -float("inf"):
        scores[1, 1:] = 0.0
    some = requests_of(3)
    with pytest.raises(RuntimeError, match="not numbers"):
        sampler(5, **options)(scores, some)
    assert [token < 0 for token in sampler(5, **options).without_waiting(scores, some)] == [False, True, False]


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


@pytest.mark.some_cases
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
    some = requests_of(8)
    sure = 0
    for name, scores in rows_of_all_kinds():
        expected = warpers(torch.zeros(8, 1, dtype=torch.long), scores)
        # Which of several equals stay at the edge of a nucleus is anybody's guess, also in transformers.
        comparable = "top_p" not in options or name not in ("ties", "many ties", "equal")
        for width in (60, 1024, 10_000):
            ids, short, certain = host_sampler._shortlist(scores, warpers, width)
            found = torch.full_like(scores, -torch.inf).scatter(-1, ids, short)
            if not comparable:
                found, expected = found.sort().values, expected.sort().values
            assert torch.equal(found[certain], expected[certain]), (name, width)
            assert not certain[(expected > -torch.inf).sum(dim=-1) > width].any()
            sure += int(certain.sum())
        if comparable:
            for seed in range(10):
                drawn = host_sampler.drawn(scores, noise_for(some, scores.shape[1], seed), warpers).tolist()
                assert drawn == [expected_token(expected[row], seed, row, 0, 0) for row in range(8)]
    assert sure or options.get("min_p") == 0


def test_a_shortlist_that_is_too_short_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[tuple[int, int]] = []
    attempt = host_sampler._attempt

    def watched_attempt(scores: torch.Tensor, noise: Noise, warpers: Any, width: int) -> torch.Tensor:
        widths.append((width, len(scores)))
        return attempt(scores, noise, warpers, width)

    monkeypatch.setattr(host_sampler, "_attempt", watched_attempt)
    rows = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(1))
    rows[:2] *= 8  # two with a small nucleus
    rows[3, :500] = 30  # 500 equals are the whole of it
    noise = noise_for(requests_of(4), 20_000)
    for warpers, tries in (
        ([processors.TopPLogitsWarper(0.9011)], [(1024, 4), (16384, 1)]),
        # 450 of 500: rounding decides, so transformers does.
        ([processors.TopPLogitsWarper(0.9)], [(1024, 4), (16384, 2), (262144, 1)]),
        ([processors.TopKLogitsWarper(50)], [(114, 4), (1824, 1)]),
    ):
        widths.clear()
        host_sampler.drawn(rows, noise, warpers)
        assert widths == tries
    widths.clear()
    host_sampler.drawn(rows, noise, [])
    assert [rows for _, rows in widths] == [4]


# -- processors that look back ---------------------------------------------------------------------------------


def looked_back(logits: torch.Tensor, some: Sequence[Request], model: Any, **options: Any) -> torch.Tensor:
    resolved = resolve_options(model, None, {"max_new_tokens": 50, **options})
    chains = processor_chains.ProcessorChains(model, [resolved] * len(some))
    history = rows_together.Histories(some, logits.device).of
    return rows_together.apply_looking_back(logits, some, [chains.of(request) for request in some], history)


@pytest.mark.parametrize("options", LOOKING_BACK, ids=brief)
@pytest.mark.parametrize("extra", [False, True], ids=["", "and one that needs each row by itself"])
def test_rows_of_different_lengths_are_processed_as_each_by_itself(
    options: dict[str, Any], extra: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = build(FAMILY)
    if extra:
        made = processor_chains.make_processors

        def with_another(*args: Any, **given: Any) -> LogitsProcessorList:
            return LogitsProcessorList([*made(*args, **given), Discouraging()])

        monkeypatch.setattr(processor_chains, "make_processors", with_another)
    logits = torch.randn(24, 101, generator=torch.Generator().manual_seed(4)) * 3
    before = logits.clone()
    some = requests_of(24, HISTORIES)
    found = looked_back(logits, some, model, **options)
    assert torch.equal(logits, before)
    for row, request in enumerate(some):
        ids = torch.tensor([request.tokens(0, request.length).tolist()])
        every = processors_of(model, len(request.prompt_ids), **{"do_sample": False, **options})
        every = [*every, Discouraging()] if extra else every
        expected = LogitsProcessorList(every)(ids, before[row : row + 1].clone())
        assert torch.equal(found[row], expected[0])


def test_a_penalty_that_spares_a_part_of_the_prompt_goes_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    penalty = processors.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2)
    monkeypatch.setattr(processor_chains, "make_processors", lambda *_, **__: LogitsProcessorList([penalty]))
    logits, some = torch.randn(6, 101), requests_of(6, ((5, 0), (9, 3)))
    found = looked_back(logits, some, build(FAMILY))
    for row, request in enumerate(some):
        ids = torch.tensor([request.tokens(0, request.length).tolist()])
        assert torch.equal(found[row], penalty(ids, logits[row : row + 1])[0])


def test_one_processor_for_all_rows_gives_what_it_gives_to_one() -> None:
    """Those that ``HostSampler`` takes to be blind to what came before, and to other rows."""
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
    assert {type(processor) for processor in blind} == set(processor_chains.BLIND_TO_HISTORY)
    scores = torch.randn(7, 200, generator=torch.Generator().manual_seed(4)) * 3
    for processor in blind:
        together = rows_together.apply_blind([processor], scores)
        for row in range(7):
            alone = processor(torch.randint(200, (1, 30)), scores[row : row + 1])
            torch.testing.assert_close(together[row], alone[0])


def test_greedy_takes_the_lowest_of_equals() -> None:
    scores = torch.zeros(3, LARGE)
    scores[1, [70_000, 200_000]] = 1.0
    assert sampler(None)(scores, requests_of(3)) == [0, 70_000, 0]


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
@pytest.mark.parametrize("looks", [False, True], ids=["cut by kernels", "cut by transformers"])
def test_a_device_draws_the_same_and_is_waited_for_once_for_each_look(
    options: dict[str, Any], looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(64, LARGE, generator=torch.Generator().manual_seed(4)) * 6
    some = requests_of(64, HISTORIES)
    expected = sampler(5, **options)(logits, some)
    record = (lambda *_: None) if looks else None
    onto = sampler(5, copy.deepcopy(large_model()).cuda(), triton_sampling(), record, **options)
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
    cuts = looks and options != {"top_k": 0}
    assert waits == 1 + cuts  # the tokens; before them, whether the best scores were enough for a cut
