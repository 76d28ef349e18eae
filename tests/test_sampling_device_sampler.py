"""Sampling on the device: the distribution and greedy tokens of transformers' processors, and no wait for the host."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from support_distributions import assert_drawn_from, brief, processors_of
from support_families import build
from support_host_sampler import HISTORIES, LOOKING_BACK, Discouraging, requests_of, sampler
from support_kernels import DEVICE, GPU, kernel, plain
from transformers import LogitsProcessorList

from hf_batchllm.inputs.options import Options
from hf_batchllm.inputs.resolve_options import resolve_options
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.sampling import device_options
from hf_batchllm.sampling.device_options import minimum_of, why_not_on_device, why_picked_by_host
from hf_batchllm.sampling.device_sampler import DeviceSampler, RowsState
from hf_batchllm.sampling.sampling_kernels import SamplingKernels, torch_sampling, triton_sampling

FAMILY, VOCABULARY = "llama", 101
INF = float("inf")


def resolved(**options: Any) -> Options:
    return resolve_options(build(FAMILY), None, {"do_sample": True, "max_new_tokens": 50, **options})


def sampler_of(
    *each: dict[str, Any],
    seed: int | None = 7,
    kernels: SamplingKernels | None = None,
    device: str = "cpu",
    vocabulary: int = VOCABULARY,
) -> DeviceSampler:
    """For rows of each of the options."""
    kinds = [resolved(**options) for options in each]
    return DeviceSampler(kinds, seed, vocabulary, device, kernels or torch_sampling())


def state_of(requests: list[Request], sampler: DeviceSampler, device: str = "cpu") -> RowsState:
    """Rows whose options are the sampler's, in turn by their requests' indices."""
    kinds = list(sampler.kinds)
    options = [kinds[request.index % len(kinds)] for request in requests]

    def each(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    seen = np.stack([sampler.seen(request.tokens(0, request.length)) for request in requests])
    return RowsState(
        prompt=each(request.index for request in requests),
        sample=each(request.sample for request in requests),
        made=each((len(request.generated) for request in requests), torch.int32),
        kind=each((sampler.kinds[chosen] for chosen in options), torch.int32),
        minimum=each(map(minimum_of, options, (len(request.prompt_ids) for request in requests)), torch.int32),
        seen=torch.from_numpy(seen).to(device),
    )


def expanded(state: RowsState, rows: int) -> RowsState:
    """Its only row, so many times."""
    each = {name: value for name, value in vars(state).items() if value is not None}
    return RowsState(**{name: value.expand(rows, *value.shape[1:]).clone() for name, value in each.items()})


def scores_of(rows: int, vocabulary: int = VOCABULARY, seed: int = 4) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


# -- what is asked for -----------------------------------------------------------------------------------------


@plain
@pytest.mark.parametrize("options", LOOKING_BACK, ids=brief)
def test_greedy_tokens_are_those_of_the_processors(options: dict[str, Any]) -> None:
    requests, scores = requests_of(60, HISTORIES), scores_of(60)
    scores[::7] = scores[::7].round()
    scores[:, 5] += 8  # EOS would be the best
    mine = sampler_of(options | {"do_sample": False}, seed=None)
    before = scores.clone()
    tokens = mine(scores, state_of(requests, mine))
    assert torch.equal(scores, before)
    assert tokens.tolist() == sampler(None, build(FAMILY), **options)(scores, requests)


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"top_k": 0, "temperature": 0.7, "top_p": 0.9},
        {"top_k": 12, "temperature": 2.0},
        {"min_p": 0.02},
        {"top_k": 20, "top_p": 0.95, "min_p": 0.05, "temperature": 1.3, "repetition_penalty": 1.3},
        {"top_p": 0.9, "min_new_tokens": 4000, "max_new_tokens": 5000, "eos_token_id": [60, 61]},
    ],
    ids=brief,
)
def test_draws_are_from_what_the_processors_leave(options: dict[str, Any]) -> None:
    draws, scores = 20_000, scores_of(1)
    prompt = np.arange(0, 60, 3, dtype=np.int32)
    rows = [Request(1, prompt, 50_000, sample=sample) for sample in range(draws)]
    mine = sampler_of(options)
    state = expanded(state_of(rows[:1], mine), draws)
    state.sample.copy_(torch.arange(draws))
    drawn = mine(scores.expand(draws, -1), state)
    processed = processors_of(build(FAMILY), len(prompt), **options)(torch.from_numpy(prompt.astype(int))[None], scores)
    assert_drawn_from(processed[0].double().softmax(dim=-1).numpy(), drawn.tolist())


@plain
def test_a_token_depends_on_its_own_row_alone() -> None:
    options = {"top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2, "min_new_tokens": 3, "eos_token_id": 5}
    mine, requests, scores = sampler_of(options), requests_of(24, HISTORIES), scores_of(24)
    every = mine(scores, state_of(requests, mine)).tolist()
    some = [17, 3, 8, 9]
    alone = mine(scores[some], state_of([requests[row] for row in some], mine)).tolist()
    assert alone == [every[row] for row in some]
    state = state_of(requests, mine)
    for name in ("prompt", "sample", "made"):
        moved = dataclasses.replace(state, **{name: getattr(state, name) + 1}, seen=state.seen.clone())
        assert mine(scores, moved).tolist() != every, name
    other = sampler_of(options, seed=8)
    assert other(scores, state_of(requests, other)).tolist() != every
    own = dataclasses.replace(state_of(requests, other), seed=torch.tensor([7, 8] * 12))
    mixed = other(scores, own).tolist()
    assert mixed[::2] == every[::2]
    assert mixed[1::2] == other(scores, state_of(requests, other)).tolist()[1::2] != every[1::2]
    wide = sampler_of(options, seed=2**64 - 1)
    assert wide(scores, state_of(requests, wide)).min() >= 0


MIXED: list[dict[str, Any]] = [
    {"do_sample": False},
    {"top_k": 0},
    {"top_k": 20, "top_p": 0.95, "temperature": 1.3, "repetition_penalty": 1.3},
    {"do_sample": False, "repetition_penalty": 1.7, "min_new_tokens": 2, "eos_token_id": [5, 6]},
    {"top_k": 0, "top_p": 0.8, "min_length": 20, "eos_token_id": 9},
    {"min_p": 0.05, "temperature": 0.6},
    {"top_k": 0, "temperature": 2.0, "min_new_tokens": 10, "eos_token_id": [7, 8, 500]},
]


@plain
@pytest.mark.parametrize("mixed", [MIXED, MIXED[:2], MIXED[1:3], [MIXED[0], MIXED[3]], MIXED[4:]], ids=len)
def test_rows_of_many_kinds_have_the_tokens_of_their_kind(mixed: list[dict[str, Any]]) -> None:
    together, count = sampler_of(*mixed), len(mixed)
    requests, scores = requests_of(count * 12, HISTORIES), scores_of(count * 12)
    scores[:, 5:9] += 5  # EOS is among the best
    state = state_of(requests, together)
    tokens = together(scores, state)
    for number, options in enumerate(mixed):
        alone, rows = sampler_of(options), slice(number, None, count)
        own = state_of(requests[rows], alone)
        assert alone(scores[rows], own).tolist() == tokens[rows].tolist()
        if alone.needs_seen:
            assert torch.equal(own.seen, state.seen[rows])


@plain
def test_settings_of_the_same_meaning_are_one_kind() -> None:
    same = [{"top_p": 0.9}, {"top_p": 0.9, "eos_token_id": 4}, {"top_p": 0.9, "min_length": 5, "eos_token_id": 500}]
    mine = sampler_of(*same)
    assert set(mine.kinds.values()) == {0} and not mine.needs_kind and not mine.needs_minimum
    mine = sampler_of(*same, {"top_p": 0.9, "min_new_tokens": 5, "eos_token_id": 4}, {"do_sample": False})
    assert list(mine.kinds.values()) == [0, 0, 0, 1, 2] and mine.needs_kind and mine.needs_minimum


@plain
def test_only_rows_with_a_penalty_need_bits() -> None:
    mine = sampler_of({"top_k": 0}, {"do_sample": False, "repetition_penalty": 3.0})
    requests, scores = requests_of(4, ((30, 0),)), scores_of(4)
    every = state_of(requests, mine)
    line, seen = torch.tensor([-1, 1, -1, 0], dtype=torch.int32), every.seen[[3, 1]].clone()
    some = dataclasses.replace(every, line=line, seen=seen)
    for _ in range(6):
        assert mine(scores, some).tolist() == mine(scores, every).tolist()
        assert torch.equal(seen, every.seen[[3, 1]])


@plain
def test_a_row_goes_on_with_what_it_has_drawn() -> None:
    """Each step's tokens are seen in the next one, as processors see them; EOS waits until the row is long enough."""
    options = {"repetition_penalty": 3.0, "min_new_tokens": 5, "eos_token_id": 5, "do_sample": False}
    mine = sampler_of(options, seed=None)
    requests = requests_of(6, ((3, 0), (20, 0)))
    state = state_of(requests, mine)
    theirs = sampler(None, build(FAMILY), **{**options, "do_sample": False})
    scores = scores_of(6)
    scores[:, 5] = 40.0
    for step in range(8):
        tokens = mine(scores, state, out=torch.full((6,), -7))
        assert tokens.tolist() == theirs(scores, requests)
        assert (tokens == 5).tolist() == [step >= 5] * 6
        state.made.add_(1)
        for request, token in zip(requests, tokens.tolist(), strict=True):
            request.generated.append(token)
            assert mine.seen(np.array([token]))[token // 32] & int(state.seen[request.index, token // 32])


@plain
def test_rows_that_are_not_numbers_give_no_token() -> None:
    scores = scores_of(4)
    scores[0, 50], scores[1, 7], scores[2] = float("nan"), INF, -INF
    for options in ({}, {"top_k": 5, "repetition_penalty": 1.5}, {"top_p": 0.5, "min_p": 0.1}):
        mine = sampler_of(options)
        state = state_of(requests_of(4), mine)
        before = state.seen.clone()
        drawn = mine(scores, state).tolist()
        assert drawn[:3] == [-1, -1, -1] and drawn[3] >= 0
        assert torch.equal(state.seen[:3], before[:3])
    greedy = sampler_of({"do_sample": False}, seed=None)
    assert greedy(scores, state_of(requests_of(4), greedy))[:3].tolist() == [50, 7, 0]


@plain
def test_the_bits_of_a_prompt() -> None:
    mine = sampler_of({})
    bits = mine.seen(np.array([0, 31, 32, 100, 100, 101, 5000, -1], dtype=np.int32))
    assert bits.dtype == np.int32 and bits.tolist() == [-(2**31) + 1, 1, 0, 1 << 4]
    assert minimum_of(resolved(min_length=30, eos_token_id=3), 12) == 18
    assert minimum_of(resolved(min_length=30, eos_token_id=3), 40) == 0
    assert minimum_of(resolved(min_length=30, min_new_tokens=2, eos_token_id=3), 12) == 2


# -- what cannot be asked for ----------------------------------------------------------------------------------


@plain
@pytest.mark.parametrize("options", LOOKING_BACK, ids=brief)
@pytest.mark.parametrize(
    "sampling", [{"do_sample": False}, {"top_p": 0.9, "min_p": 0.1, "temperature": 0.3}], ids=brief
)
def test_what_stays_on_the_device(options: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert why_not_on_device(resolved(**options, **sampling), build(FAMILY), 97) is None


@plain
def test_one_prompt_that_needs_the_host_takes_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_batchllm.sampling.device_options.failed_check", lambda group, device, **_: False)
    model, device = build(FAMILY), torch.device("cuda")
    plain_ones = [resolved(temperature=0.5 + number / 100) for number in range(20)]
    odd = resolved(top_h=0.5, top_p=0.5)
    assert why_picked_by_host(plain_ones, model, device, 2, 0, VOCABULARY) is None
    reason = why_picked_by_host([*plain_ones, odd], model, device, 2, 0, VOCABULARY)
    assert reason is not None and "`top_h`" in reason and "all prompts" in reason
    assert "all prompts" not in str(why_picked_by_host([odd], model, device, 2, 0, VOCABULARY))
    reason = why_picked_by_host(plain_ones, model, device, 2, 10**9, VOCABULARY)
    assert reason is not None and "more than 512 MB on the device" in reason and "fewer prompts" in reason
    # Where noise is the host's, it stays so, whatever other prompts are.
    greedy = resolved(do_sample=False)
    for kinds, depth, host in (([greedy], 4, False), ([greedy], 1, True), ([greedy, odd], 4, True)):
        assert (why_picked_by_host(kinds, model, torch.device("cpu"), depth, 0, VOCABULARY) is not None) == host


@plain
def test_processors_are_known_by_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    made = device_options.make_processors
    options = resolved(top_k=5, repetition_penalty=1.5, min_new_tokens=3, eos_token_id=3, temperature=0.5)

    def changed(change: Any) -> str:
        def altered(*args: Any) -> LogitsProcessorList:
            every = list(made(*args))
            return LogitsProcessorList(change(every) or every)

        monkeypatch.setattr(device_options, "make_processors", altered)
        reason = why_not_on_device(dataclasses.replace(options), build(FAMILY), 97)  # others are remembered
        assert reason is not None
        return reason

    assert "Discouraging is worked out" in changed(lambda every: every.append(Discouraging()))
    assert "`repetition_penalty`" in changed(lambda every: setattr(every[0], "prompt_ignore_length", 3))
    assert "`top_k`" in changed(lambda every: setattr(every[-1], "min_tokens_to_keep", 2))
    for change in (lambda every: every[::-1], lambda every: every[:-1], lambda every: every[1:] + every[:1]):
        assert "order of its own" in changed(change)


# -- the kernels -----------------------------------------------------------------------------------------------

COMBINED: list[dict[str, Any]] = [
    {"top_k": 0},
    {"top_k": 50, "top_p": 0.9, "temperature": 0.6},
    {"top_k": 0, "top_p": 0.9, "min_p": 0.01},
    {"top_k": 20, "repetition_penalty": 1.3, "min_new_tokens": 4, "eos_token_id": [5, 6]},
    {"do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 4, "eos_token_id": [5, 6]},
]


EACH = [*([options] for options in COMBINED), MIXED, COMBINED[:3]]


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("options", EACH, ids=str)
def test_kernels_and_references_give_the_same_tokens(options: list[dict[str, Any]]) -> None:
    vocabulary, rows = (2100, max(4, len(options))) if not GPU else (128_256, 64)
    scores = scores_of(rows, vocabulary)
    scores = scores.bfloat16() if GPU else scores
    requests = requests_of(rows, HISTORIES, vocabulary)
    tokens = []
    for kernels, device in ((torch_sampling(), "cpu"), (triton_sampling(), DEVICE)):
        mine = sampler_of(*options, kernels=kernels, device=device, vocabulary=vocabulary)
        state = state_of(requests, mine, device)
        tokens.append([mine(scores.to(device), state).tolist() for _ in range(2)])
    # Two noisy scores that float32 cannot tell apart, or a nucleus whose edge it cannot: next to never.
    same = sum(a == b for one, other in zip(*tokens, strict=True) for a, b in zip(one, other, strict=True))
    assert same >= 2 * rows - (1 if GPU else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("options", EACH, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_wait_for_the_host_and_a_graph_replays_native(options: list[dict[str, Any]], dtype: torch.dtype) -> None:
    rows, vocabulary = 37, 50_257
    mine = sampler_of(*options, kernels=triton_sampling(), device="cuda", vocabulary=vocabulary)
    state = state_of(requests_of(rows, HISTORIES, vocabulary), mine, "cuda")
    logits, out = torch.zeros(rows, vocabulary, dtype=dtype, device="cuda"), torch.zeros(rows, dtype=torch.int64).cuda()
    mine(logits, state, out)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mine(logits, state, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine(logits, state, out)
    for step in range(4):
        logits.copy_(scores_of(rows, vocabulary, step))
        state.prompt.add_(1)
        state.made.copy_(torch.arange(rows) % (step + 2))
        state.seen.copy_(torch.randint(-(2**31), 2**31 - 1, state.seen.shape, generator=torch.manual_seed(step)))
        before = state.seen.clone()
        graph.replay()
        replayed, after = out.clone(), state.seen.clone()
        state.seen.copy_(before)
        assert torch.equal(replayed, mine(logits, state))
        assert torch.equal(after, state.seen)
        assert (replayed >= 0).all() and (mine.needs_seen or torch.equal(before, after))


@plain
@pytest.mark.skipif(GPU, reason="the kernels are launched natively")
def test_kernels_are_compiled_once_however_many_rows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's numbers are lines of a table, which lie at other addresses for each number of rows."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import jit

    backend, asked = CUDABackend(GPUTarget("cuda", 90, 32)), defaultdict(set)

    def noted(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        find = jit.create_function_from_signature(self.signature, self.params, backend)
        bound, kinds, _ = find(*arguments, **options)
        asked[self.fn.__name__].add(tuple(zip(bound, map(str, kinds), strict=True)))

    monkeypatch.setattr(jit.JITFunction, "run", noted)
    greedy = {"do_sample": False, "min_new_tokens": 4, "eos_token_id": 3, "repetition_penalty": 1.2}
    cutting = {"top_k": 5, "top_p": 0.9, "min_p": 0.1}
    nucleus = {"top_k": 0, "top_p": 0.9}
    sampler = sampler_of(greedy, cutting, nucleus, kernels=triton_sampling(), vocabulary=2048)
    for rows in (5, 6, 7, 8):
        prompt, sample, kind, minimum, line = torch.zeros(5, rows, dtype=torch.int32)
        made, seen = torch.zeros(rows, dtype=torch.int32), torch.zeros(9, 2048 // 32, dtype=torch.int32)
        sampler(torch.zeros(rows, 2048), RowsState(prompt, sample, made, kind, minimum, line, seen))
    assert {"_penalise", "_survey", "_cut", "_draw_from_best_block", "_mark_seen"} <= asked.keys()
    differ = {name: set.union(*map(set, kinds)) - set.intersection(*map(set, kinds)) for name, kinds in asked.items()}
    assert not any(differ.values()), differ
