"""The kernels of ``top_k_top_p_triton`` against their references, and these against transformers' processors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support_distributions import assert_drawn_from, brief, processors_of
from support_kernels import DEVICE, INTERPRETED, copies, kernel, plain
from support_sampling_cases import (
    INF,
    KINDS,
    NAN,
    NATIVE,
    assert_near_the_edge,
    bits_of,
    gap,
    keys,
    masses,
    random_options,
    rows_of,
)
from transformers import LlamaConfig, LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from hf_batchllm.kernels.reference import penalties_torch, sample_torch, top_k_top_p_torch
from hf_batchllm.kernels.triton import penalties_triton, sample_triton, top_k_top_p_triton

# -- rows ------------------------------------------------------------------------------------------------------


@cache
def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))


# -- cutoffs: the reference against transformers --------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 2999},
    {"top_k": 100_000},
    {"top_k": 0, "top_p": 0.9},
    {"top_k": 0, "top_p": 0.3, "temperature": 1.4},
    {"top_k": 0, "top_p": 0.999, "temperature": 0.5},
    {"top_k": 0, "top_p": 0.0},
    {"top_k": 0, "min_p": 0.05},
    {"top_k": 0, "min_p": 1.0},
    {"top_k": 0, "min_p": 0.0},
    {"top_k": 0, "min_p": 0.2, "temperature": 0.3},
    {"top_k": 50, "top_p": 0.9, "temperature": 0.6},
    {"top_k": 500, "top_p": 0.95, "min_p": 0.01, "temperature": 2.5},
    {"top_k": 0, "top_p": 0.95, "min_p": 0.1},
]


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "spread"])
@pytest.mark.parametrize("options", OPTIONS, ids=brief)
def test_what_stays_is_what_transformers_leaves(options: dict[str, Any], kind: str) -> None:
    warpers = processors_of(model(), 1, **options)
    for seed, vocabulary in ((1, 3000), (2, 3000), (3, 17)):
        scores = rows_of(kind, 4, vocabulary, seed)
        edge = top_k_top_p_torch.cutoffs(scores, **options)[:, None]
        ours = (scores >= edge) & (scores > -INF)
        # In float64 its rounding decides nothing; in float32, as in use, what lies within rounding of a nucleus' edge.
        for dtype, doubt in ((torch.float64, 0.0), (torch.float32, 1e-5)):
            theirs = warpers(torch.zeros(4, 1, dtype=torch.long), scores.to(dtype)) > -INF
            differ = ours != theirs
            if "top_p" in options:  # of equals at the edge it keeps some
                equals = scores == edge
                differ &= ~(ours & equals & (theirs & equals).any(dim=-1, keepdim=True))
            for row, token in differ.nonzero().tolist():
                mass = masses(scores[row], options)
                before = float(mass[scores[row] > scores[row, token]].sum())
                assert abs(before - options["top_p"]) < doubt, (dtype, before)


def kept(scores: list[float], **options: Any) -> list[int]:
    row = torch.tensor([scores])
    edge = top_k_top_p_torch.cutoffs(row, **options)
    if DEVICE == "cuda" or INTERPRETED:
        assert torch.equal(top_k_top_p_triton.cutoffs(row.to(DEVICE), **options).cpu(), edge)
    return (row >= edge[:, None])[0].nonzero()[:, 0].tolist()


def test_equals_stay_together() -> None:
    scores = [0.0, 2.0, 1.0, 2.0, 1.0, -INF, 1.0]
    assert kept(scores, top_k=1) == [1, 3]
    assert kept(scores, top_k=2) == [1, 3]
    assert kept(scores, top_k=3) == [1, 2, 3, 4, 6]
    assert kept(scores, top_k=6) == [0, 1, 2, 3, 4, 6]
    assert kept(scores, top_k=7) == kept(scores) == [0, 1, 2, 3, 4, 5, 6]
    assert kept(scores, top_p=0.0) == [1, 3]
    assert kept(scores, top_p=0.61) == [1, 3]  # e^2 twice is 0.618 of all, and after top-k 0.644
    assert kept(scores, top_p=0.62) == kept(scores, top_p=0.9) == [1, 2, 3, 4, 6]
    assert kept(scores, top_p=0.62, top_k=3) == [1, 3]
    assert kept(scores, min_p=1.0) == [1, 3]
    assert kept(scores, min_p=0.3) == [1, 2, 3, 4, 6]
    assert kept(scores, min_p=0.3, temperature=0.5) == [1, 3]


def test_rows_without_a_distribution_are_left_to_the_draw() -> None:
    rows = torch.randn(6, 700)
    rows[0, 3], rows[1, 699], rows[2], rows[3, 1:] = NAN, INF, -INF, -INF
    rows[5] = NAN
    for options in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}):
        every = [top_k_top_p_torch.cutoffs(rows, **options)]
        if DEVICE == "cuda" or INTERPRETED:
            every.append(top_k_top_p_triton.cutoffs(rows.to(DEVICE), **options).cpu())
        for edge in every:
            assert edge[[0, 1, 2, 5]].tolist() == [-INF] * 4
            assert edge[4] > -INF and edge[3] <= rows[3, 0]


# -- cutoffs: the kernel against the reference ----------------------------------------------------------------------

VOCABULARIES = [1, 37, 64, 1500, 4096, 5003]


def check_cutoffs(seed: int, vocabulary: int, dtype: torch.dtype, most: int) -> None:
    rng = np.random.default_rng(seed)
    rows, kind, options = int(rng.integers(1, most)), list(KINDS)[seed % len(KINDS)], random_options(rng, vocabulary)
    if kind in ("spread", "large") and dtype == torch.float16:
        dtype = torch.float32
    logits = rows_of(kind, rows, vocabulary, seed).to(dtype)
    if rng.random() < 0.2:
        logits[rng.integers(0, rows), rng.integers(0, vocabulary)] = rng.choice([NAN, INF, -INF])
    wide = torch.empty(rows, vocabulary + 16, dtype=dtype, device=DEVICE)[:, :vocabulary]  # a stride of its own
    got = top_k_top_p_triton.cutoffs(
        wide.copy_(logits), **options, out=torch.full((rows,), -7.0, device=DEVICE)
    ).tolist()
    want = top_k_top_p_torch.cutoffs(logits, **options).tolist()
    for row in range(rows):
        if got[row] != want[row]:
            assert_near_the_edge(logits[row], got[row], want[row], options)


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("seed", range(4))
def test_cutoffs(vocabulary: int, seed: int) -> None:
    dtype = [torch.float32, torch.float16][seed % 2]
    check_cutoffs(seed + 4 * VOCABULARIES.index(vocabulary), vocabulary, dtype, most=4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(330))
def test_cutoffs_native(case: int) -> None:
    vocabulary = NATIVE[case % 6]
    dtype = torch.float32 if vocabulary in (32000, 262144) else torch.bfloat16
    if case % 5 == 0 and vocabulary == 5003:
        dtype = torch.float16
    check_cutoffs(case, vocabulary, dtype, most=[2, 9, 20][case // 6 % 3])


@kernel
def test_cutoffs_do_not_depend_on_the_batch() -> None:
    rows = rows_of("normal", 5, 3000, 0)
    for options in ({"top_k": 40, "top_p": 0.8}, {"top_p": 0.9}):
        every = top_k_top_p_triton.cutoffs(rows.to(DEVICE), **options).tolist()
        assert top_k_top_p_triton.cutoffs(rows[[3, 1]].to(DEVICE), **options).tolist() == [every[3], every[1]]
    assert top_k_top_p_triton.cutoffs(rows[:0].to(DEVICE), top_k=3).shape == (0,)


# -- gumbel_sample with a threshold ----------------------------------------------------------------------------


def check_gumbel(seed: int, vocabulary: int, dtype: torch.dtype, most: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, most))
    logits = rows_of(["normal", "flat", "bfloat16", "forbidden"][seed % 4], rows, vocabulary, seed).to(dtype)
    logits[:, 0] = 9.0  # whatever is forbidden, something is left
    options, given = random_options(rng, vocabulary), keys(rng, rows)
    temperature, edge = options["temperature"], top_k_top_p_torch.cutoffs(logits, **options)
    got = sample_triton.gumbel_sample(
        logits.to(DEVICE), temperature, **copies(given, DEVICE), threshold=edge.to(DEVICE)
    ).cpu()
    want = sample_torch.gumbel_sample(logits, temperature, **given, threshold=edge)
    chosen = logits.gather(1, got[:, None])[:, 0].float()
    assert (chosen >= edge).all() and (chosen > -INF).all()
    for row in (got != want).nonzero().flatten().tolist():  # float32 may see two as equal
        left = torch.where(logits[row] < edge[row], -INF, logits[row].float())
        assert gap(left.double() / temperature, given, row, int(got[row]), int(want[row])) < 3e-5


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("vocabulary", [1, 37, 4096, 5003])
@pytest.mark.parametrize("seed", range(4))
def test_gumbel_sample(vocabulary: int, seed: int) -> None:
    check_gumbel(seed, vocabulary, [torch.float32, torch.float16][seed % 2], most=5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(300))
def test_gumbel_sample_native(case: int) -> None:
    dtype = torch.float32 if case % 6 == 2 else torch.bfloat16
    check_gumbel(case, NATIVE[case % 6], dtype, most=[2, 4, 7][case // 6 % 3])


@kernel
def test_a_threshold_hides_no_logit_that_is_no_number() -> None:
    logits = torch.zeros(4, 2100)
    logits[0, 3], logits[1, 2090], logits[2] = NAN, INF, -INF
    given, edge = keys(np.random.default_rng(0), 4), torch.tensor([-INF, -INF, -INF, 0.5])
    for module, device in ((sample_torch, "cpu"), (sample_triton, DEVICE)):
        drawn = module.gumbel_sample(logits.to(device), 1.0, **copies(given, device), threshold=edge.to(device))
        assert drawn.tolist() == [-1, -1, -1, -1]


def check_distribution(
    module: Any, cutoffs: Callable[..., torch.Tensor], rows: int, device: str, **options: Any
) -> None:
    """Draws of one row at many positions, over 32,000 tokens: the far end of what is left has its share, too."""
    vocabulary, temperature = 32_000, options.get("temperature", 1.0)
    scores = rows_of("normal", 1, vocabulary, 5) / 4 * options.pop("scale")
    processed = processors_of(model(), 1, **options)(torch.zeros(1, 1, dtype=torch.long), scores.double())[0]
    logits = scores.to(device)
    edge = cutoffs(logits, **options)
    drawn = []
    for begin in range(0, rows, 500):
        position = torch.arange(begin, min(begin + 500, rows), device=device)
        same = torch.full_like(position, 5)
        seed = torch.tensor([11], device=device)
        every = logits.expand(len(position), -1)
        drawn.append(
            module.gumbel_sample(
                every, temperature, seed, same, same, position, threshold=edge.expand(len(position)).contiguous()
            )
        )
    found = torch.cat(drawn).cpu().numpy()
    probabilities = processed.softmax(dim=-1).numpy()
    assert_drawn_from(probabilities, found)
    rank = probabilities.argsort().argsort() // 500  # the rare ones together, and the frequent ones
    assert_drawn_from(np.bincount(rank, probabilities), rank[found])


WARPED: list[dict[str, Any]] = [
    {"scale": 1.0, "top_k": 0, "top_p": 0.97, "temperature": 0.8},
    {"scale": 1.0, "top_k": 20_000},
    {"scale": 3.0, "top_k": 50, "top_p": 0.9},
    {"scale": 1.0, "top_k": 0, "min_p": 0.01},
]


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize(("options", "draws"), [(WARPED[0], 3_000), (WARPED[2], 2_000)])
def test_draws_follow_what_is_left(options: dict[str, Any], draws: int) -> None:
    check_distribution(sample_torch, top_k_top_p_torch.cutoffs, draws, "cpu", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", WARPED, ids=brief)
def test_draws_follow_what_is_left_native(options: dict[str, Any]) -> None:
    check_distribution(sample_triton, top_k_top_p_triton.cutoffs, 1_000_000, "cuda", **options)


# -- what looks back -------------------------------------------------------------------------------------------


@plain
@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_penalties_are_those_of_transformers(penalty: float) -> None:
    rng = np.random.default_rng(0)
    for vocabulary in (5, 64, 333):
        ids = rng.integers(0, vocabulary, (6, 40))
        scores = rows_of("forbidden", 6, vocabulary, 3) + torch.randint(-9, 9, (6, vocabulary)).float()
        want = RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(ids), scores.clone())
        before = scores.clone()
        assert torch.equal(
            penalties_torch.penalise(scores, seen=bits_of(ids.tolist(), vocabulary), penalty=penalty), want
        )
        assert torch.equal(scores, before)


def check_looking_back(seed: int, vocabulary: int, dtype: torch.dtype, most: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, most))
    logits = rows_of(["normal", "many ties", "forbidden"][seed % 3], rows, vocabulary, seed).to(dtype)
    if rng.random() < 0.3:
        logits[rng.integers(0, rows), rng.integers(0, vocabulary)] = rng.choice([NAN, INF, -INF])
    # Two tokens of one word may be marked at once, and some are none of the vocabulary's.
    tokens = torch.from_numpy(rng.integers(-2, vocabulary + 2, (rows, int(rng.integers(1, 300)))))
    words = -(-vocabulary // 32)
    ours = torch.zeros(rows, words + 3, dtype=torch.int32, device=DEVICE)[:, :words]
    penalties_triton.mark_seen(ours, tokens.to(DEVICE), vocabulary)
    some = torch.from_numpy(rng.integers(-1, vocabulary, rows))
    penalties_triton.mark_seen(ours, some.to(DEVICE), vocabulary)
    tokens = torch.cat((tokens, some[:, None]), 1)
    marked = [[token for token in row if 0 <= token < vocabulary] for row in tokens.tolist()]
    seen = bits_of(marked, vocabulary)
    assert torch.equal(ours.cpu(), seen)
    theirs = torch.zeros_like(seen)
    penalties_torch.mark_seen(theirs, tokens, vocabulary)
    assert torch.equal(theirs, seen)

    given: dict[str, Any] = {}
    if seed % 4 != 1:
        given |= {"seen": seen, "penalty": float(rng.choice([0.7, 1.1, 3.0]))}
    if seed % 4 != 2:
        given["eos"] = torch.from_numpy(rng.integers(0, vocabulary, int(rng.integers(1, 4))))
        given["made"] = torch.from_numpy(rng.integers(0, 4, rows)).to([torch.int32, torch.int64][seed % 2])
        given["minimum"] = torch.from_numpy(rng.integers(0, 4, rows)).to(torch.int32)
    want = penalties_torch.penalise(logits, **given)
    mine = logits.to(DEVICE)
    got = penalties_triton.penalise(mine, **copies(given, DEVICE), out=mine if dtype == torch.float32 else None)
    assert got.dtype == torch.float32
    assert torch.equal(got.cpu().nan_to_num(nan=123.0), want.nan_to_num(nan=123.0))


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("vocabulary", [1, 31, 64, 4096, 5003])
@pytest.mark.parametrize("seed", range(4))
def test_looking_back(vocabulary: int, seed: int) -> None:
    check_looking_back(seed, vocabulary, [torch.float32, torch.float16][seed // 2], most=5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(300))
def test_looking_back_native(case: int) -> None:
    dtype = torch.float32 if case % 6 in (0, 5) else torch.bfloat16
    check_looking_back(case, NATIVE[case % 6], dtype, most=[2, 9, 30][case // 6 % 3])
