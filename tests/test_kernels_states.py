"""Kernels that carry a state from token to token beside their references, and these beside transformers' code."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from support_kernels import DEVICE, GPU, copies, draw, kernel, plain
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from hf_batchllm.kernels.lists.spans import CHUNK, Spans
from hf_batchllm.kernels.reference import convolution_torch, delta_rule_torch, state_space_torch
from hf_batchllm.kernels.triton import (
    convolution_triton,
    delta_rule_chunks_triton,
    delta_rule_triton,
    state_space_chunks_triton,
    state_space_triton,
)

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {FLOAT32: 2e-6, BFLOAT16: 2e-2, FLOAT16: 2.5e-3}  # parts of the largest number
SLOTS = 6
# Lengths, sources, targets: a sequence begins, goes on, two begin on a prefix, one is not kept, one has no token.
MIXED = [5, 1, 3, 3, 2, 0], [-1, 1, 0, 0, 0, 0], [2, 1, 3, 5, -1, 4]
ROWS = [1, 1, 1, 1], [1, 0, 0, -1], [1, 2, 3, -1]  # of a decode step; the last one is idle
CASES = {"mixed": MIXED, "rows": ROWS, "one": ([19], [2], [2])}
# Around whole chunks, from odd places. The interpreter takes seconds for each chunk.
LONG = [5, 64, 65, 0, 130], [-1, 1, 0, 0, 5], [2, 1, -1, 4, 5]
if GPU:
    LONG = [5, 64, 65, 130, 0, 200], [-1, 1, 0, 0, 0, 5], [2, 1, 3, -1, 4, 5]


def spans_of(case: str, device: str = "cpu") -> Spans:
    return Spans.of(*(CASES | {"long": LONG})[case], device=device)


def convolution(rng: np.random.Generator, tokens: int, dtype: torch.dtype, taps: int = 4) -> dict[str, Any]:
    channels = 37
    wide = draw(rng, tokens, 2 * channels, dtype=dtype)
    return {
        "x": wide[:, 5 : 5 + channels],
        "weight": draw(rng, channels, taps, dtype=dtype),
        "bias": draw(rng, channels, dtype=dtype),
        "states": draw(rng, SLOTS, taps - 1, channels, dtype=dtype),
    }


def delta_rule(rng: np.random.Generator, tokens: int, dtype: torch.dtype, by_key: bool = False) -> dict[str, Any]:
    heads, value_heads, key_dim, value_dim = (2, 4, 24, 40) if not by_key else (3, 3, 16, 16)
    shape = (tokens, value_heads, key_dim) if by_key else (tokens, value_heads)
    return {
        "q": draw(rng, tokens, heads, key_dim, dtype=dtype),
        "k": draw(rng, tokens, heads, key_dim, dtype=dtype),
        "v": draw(rng, tokens, value_heads, value_dim, dtype=dtype),
        "decay": -draw(rng, *shape, dtype=FLOAT32).abs(),
        "beta": draw(rng, tokens, value_heads, dtype=dtype).sigmoid(),
        "states": draw(rng, SLOTS, value_heads, key_dim, value_dim, dtype=FLOAT32),
    }


def state_space(rng: np.random.Generator, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    heads, head_dim, groups, state_dim = 4, 24, 2, 40
    return {
        "x": draw(rng, tokens, heads, head_dim, dtype=dtype),
        "dt": draw(rng, tokens, heads, dtype=dtype) * 4 - 4,
        "a": -draw(rng, heads, dtype=FLOAT32).exp(),
        "b": draw(rng, tokens, groups, state_dim, dtype=dtype),
        "c": draw(rng, tokens, groups, state_dim, dtype=dtype),
        "d": draw(rng, heads, dtype=dtype),
        "dt_bias": draw(rng, heads, dtype=dtype),
        "states": draw(rng, SLOTS, heads, head_dim, state_dim, dtype=FLOAT32),
    }


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, part: float) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    ours, theirs = ours.cpu().float(), theirs.cpu().float()
    assert (ours - theirs).abs().max() <= part * max(1.0, float(theirs.abs().max()))


def compare(kernel_of: Any, reference_of: Any, given: dict[str, Any], case: str, part: float, **options: Any) -> None:
    on_device = {name: None if each is None else each.to(DEVICE, copy=True) for name, each in given.items()}
    theirs = copy.deepcopy(given)
    made = kernel_of(**on_device, spans=spans_of(case, DEVICE), **options)
    want = reference_of(**theirs, spans=spans_of(case), **options)
    assert_near(made, want, part)
    assert_near(on_device["states"], theirs["states"], part)
    kept = [slot for slot in range(SLOTS) if slot not in spans_of(case).target.tolist()]
    assert torch.equal(on_device["states"].cpu()[kept], given["states"][kept]), "of nobody in this step"


def tokens_of(case: str) -> int:
    return sum(CASES[case][0])


@pytest.mark.some_cases("case", "dtype")
@kernel
@pytest.mark.parametrize(("taps", "activation"), [(4, "silu"), (2, None)])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_convolutions(case: str, dtype: torch.dtype, taps: int, activation: str | None) -> None:
    given = convolution(np.random.default_rng(1), tokens_of(case), dtype, taps)
    for bias in (given["bias"], None):
        some = given | {"bias": bias}
        compare(
            convolution_triton.short_convolution,
            convolution_torch.short_convolution,
            some,
            case,
            TOLERANCE[dtype],
            activation=activation,
        )


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize(("by_key", "normalise"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_delta_rules(case: str, dtype: torch.dtype, by_key: bool, normalise: bool) -> None:
    given = delta_rule(np.random.default_rng(2), tokens_of(case), dtype, by_key)
    if not normalise:  # keys of length 1 at most, without which a state grows without end
        given["k"] = torch.nn.functional.normalize(given["k"].float(), dim=-1).to(dtype)
    rule, reference = delta_rule_triton.delta_rule, delta_rule_torch.delta_rule
    compare(rule, reference, given, case, 4 * TOLERANCE[dtype], normalise=normalise)


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize(("dtype", "size"), [(FLOAT32, 16), (FLOAT16, 64)], ids=str)
def test_delta_rules_over_long_spans(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule_chunks_triton, "_SIZE", size)
    given = delta_rule(np.random.default_rng(9), sum(LONG[0]), dtype)
    given["decay"] *= 0.1  # what a chunk has taught is not forgotten in the next one
    rule, reference = delta_rule_triton.delta_rule, delta_rule_torch.delta_rule
    compare(rule, reference, given, "long", 4 * TOLERANCE[dtype], normalise=True)


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize(("dtype", "size"), [(FLOAT32, 16), (FLOAT16, 32), (FLOAT16, 64)], ids=str)
def test_a_delta_rule_over_equal_keys(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is forgotten, and each token takes back what the one before has taught: sums of powers would explode."""
    monkeypatch.setattr(delta_rule_chunks_triton, "_SIZE", size)
    given = delta_rule(np.random.default_rng(8), 90, dtype)
    given["k"] = given["k"][:1].repeat(90, 1, 1)
    given["beta"], given["decay"] = torch.ones(90, 4, dtype=dtype), torch.zeros(90, 4)
    reference, made = copy.deepcopy(given), {name: each.to(DEVICE, copy=True) for name, each in given.items()}
    want = delta_rule_torch.delta_rule(**reference, spans=Spans.of([83, 7], [0, 1], [0, 1]), normalise=True)
    ours = delta_rule_triton.delta_rule(**made, spans=Spans.of([83, 7], [0, 1], [0, 1], DEVICE), normalise=True)
    part = 1e-5 if dtype == FLOAT32 else 4 * TOLERANCE[dtype]
    assert_near(ours, want, part)
    assert_near(made["states"], reference["states"], part)


@plain
@pytest.mark.parametrize("lengths", [[1, 1, 130, 0, 64], [1, 0, 1, 1, 0], [65, 1, 1, 0, 1]], ids=str)
@pytest.mark.parametrize("rows", range(6))
def test_divided_spans(lengths: list[int], rows: int) -> None:
    whole = Spans.of(lengths, source := [3, -1, 5, 0, 1], target := [3, 2, -1, 4, 1])
    assert (whole.chunk.diff() <= CHUNK).all() and set(whole.begin.tolist()) <= set(whole.chunk.tolist())
    parts = slice(None, rows), slice(rows, None)
    for made, mine in zip(whole.divided(rows), parts, strict=True):
        want = Spans.of(lengths[mine], source[mine], target[mine])
        for name in ("begin", "source", "target", "of_token"):
            assert torch.equal(getattr(made, name), getattr(want, name)), name
        assert made.chunk.unique().tolist() == want.chunk.unique().tolist(), "but for chunks without tokens"
        assert made.single == want.single


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.02, 0.3)])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_state_spaces(case: str, dtype: torch.dtype, limit: tuple[float, float]) -> None:
    given = state_space(np.random.default_rng(3), tokens_of(case), dtype)
    for bare in ({}, {"d": None, "dt_bias": None}):
        space, reference = state_space_triton.state_space, state_space_torch.state_space
        compare(space, reference, given | bare, case, 4 * TOLERANCE[dtype], limit=limit)


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize(("dtype", "size"), [(FLOAT32, 64), (BFLOAT16, 64), (FLOAT16, 32)], ids=str)
def test_state_spaces_over_long_spans(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_space_chunks_triton, "_SIZE", size)
    monkeypatch.setattr(state_space_chunks_triton, "_LONG", 0)
    given = state_space(np.random.default_rng(10), sum(LONG[0]), dtype)
    given["a"] *= 0.1  # what a chunk has taught is not forgotten in the next one
    space, reference = state_space_triton.state_space, state_space_torch.state_space
    compare(space, reference, given, "long", 4 * TOLERANCE[dtype])


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("lengths", [[1, 63, 1], [64, 1], [1, 1, 1, 65]], ids=str)
def test_state_spaces_as_a_model_hands_them(lengths: list[int]) -> None:
    """Views of wide rows, steps without softplus, a bias in another dtype, and dimensions that fill no block."""
    rng, tokens, count = np.random.default_rng(11), sum(lengths), len(lengths)
    given = {
        "wide": draw(rng, tokens, 3 + 17 * 6 + 2 * 20, dtype=FLOAT16),
        "dt": draw(rng, 17, tokens + 5, dtype=FLOAT16).abs() * 0.1,
        "a": -draw(rng, 17, dtype=FLOAT32).exp(),
        "dt_bias": draw(rng, 17, dtype=FLOAT32) * 0.1,
        "states": draw(rng, 5, 17, 6, 20, dtype=FLOAT32),
    }

    def run(function: Any, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        there = copies(given, device)
        parts = there["wide"][:, 3:].split([17 * 6, 20, 20], 1)
        x, b, c = (part.unflatten(1, (-1, size)) for part, size in zip(parts, (6, 20, 20), strict=True))
        spans = Spans.of(lengths, [4, -1, 3, 2][:count], [0, 1, -1, 2][:count], device)
        rest = there["a"], b, c, None, there["dt_bias"], there["states"]
        return function(x, there["dt"][:, 5:].T, *rest, spans, softplus=False), there["states"]

    made, want = run(state_space_triton.state_space, DEVICE), run(state_space_torch.state_space, "cpu")
    for ours, theirs in zip(made, want, strict=True):
        assert_near(ours, theirs, 4 * TOLERANCE[FLOAT16])


@pytest.mark.some_cases
@kernel
@pytest.mark.filterwarnings("error::RuntimeWarning")  # of an overflow under the interpreter
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
@pytest.mark.parametrize(("rate", "step"), [(-1e6, 0.02), (-1e5, 1e-6), (0.0, 0.02)], ids=str)
def test_state_spaces_that_forget(dtype: torch.dtype, rate: float, step: float) -> None:
    """All at each token; all now and then, and little else; nothing. No difference overflows or loses its digits."""
    tokens = 150
    given = state_space(np.random.default_rng(12), tokens, dtype) | {"a": torch.full((4,), rate), "dt_bias": None}
    given["dt"] = torch.where(torch.arange(tokens)[:, None] % 23 == 0, 1.0, step).expand(-1, 4).to(dtype)
    ours, theirs = copies(given, DEVICE), copy.deepcopy(given)
    spans = [140, 1, 9], [0, 1, -1], [0, 1, 2]
    want = state_space_torch.state_space(**theirs, spans=Spans.of(*spans), softplus=False)
    made = state_space_triton.state_space(**ours, spans=Spans.of(*spans, DEVICE), softplus=False)
    part = 5e-5 if dtype == FLOAT32 else 4 * TOLERANCE[dtype]
    assert_near(made, want, part)
    assert_near(ours["states"], theirs["states"], part)


# -- references beside transformers' own code, span by span ----------------------------------------------------------


def each_span(case: str) -> list[tuple[slice, int, int]]:
    ends = np.cumsum(CASES[case][0])
    pairs = zip(ends - np.array(CASES[case][0]), ends, *CASES[case][1:], strict=True)
    return [(slice(int(begin), int(end)), source, target) for begin, end, source, target in pairs if begin < end]


@plain
@pytest.mark.parametrize("case", CASES)
def test_the_reference_of_convolutions(case: str) -> None:
    given = convolution(np.random.default_rng(4), tokens_of(case), FLOAT32)
    before = given["states"].clone()
    made = convolution_torch.short_convolution(**given, spans=spans_of(case), activation="silu")
    for mine, source, target in each_span(case):
        past = (before[source] if source >= 0 else torch.zeros_like(before[0])).T
        seen = torch.cat([past, given["x"][mine].T], 1)[None]
        want = qwen3_next.causal_conv1d_fn(seen, given["weight"], given["bias"], activation="silu")
        assert_near(made[mine], want[0, :, past.shape[1] :].T, 1e-6)
        if target >= 0:
            assert torch.equal(given["states"][target].T, seen[0, :, -past.shape[1] :])


@plain
@pytest.mark.parametrize("by_key", [False, True], ids=["by head", "by key"])
@pytest.mark.parametrize("case", CASES)
def test_the_reference_of_delta_rules(case: str, by_key: bool) -> None:
    given = delta_rule(np.random.default_rng(5), tokens_of(case), FLOAT32, by_key)
    before, theirs = given["states"].clone(), kimi.chunk_kimi_delta_attention
    shared = given["v"].shape[1] // given["q"].shape[1]
    own = {name: given[name].repeat_interleave(shared, 1) for name in "qk"} | {"v": given["v"]}
    made = delta_rule_torch.delta_rule(**given, spans=spans_of(case), normalise=True)
    for mine, source, target in each_span(case):
        want, state = (theirs if by_key else qwen3_next.torch_chunk_gated_delta_rule)(
            *(each[None, mine] for each in own.values()),
            g=given["decay"][None, mine],
            beta=given["beta"][None, mine],
            initial_state=before[source][None] if source >= 0 else None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        assert_near(made[mine], want[0], 1e-5)
        if target >= 0:
            assert_near(given["states"][target], state[0], 1e-5)


@plain
@pytest.mark.parametrize("case", CASES)
def test_the_reference_of_state_spaces(case: str) -> None:
    given = state_space(np.random.default_rng(6), tokens_of(case), FLOAT32)
    before = given["states"].clone()
    made = state_space_torch.state_space(**given, spans=spans_of(case))
    for mine, source, target in each_span(case):
        want, state = mamba2.mamba2_chunk_scan(
            given["x"][None, mine],
            given["dt"][None, mine],
            given["a"],
            given["b"][None, mine],
            given["c"][None, mine],
            chunk_size=8,
            D=given["d"],
            dt_bias=given["dt_bias"],
            initial_states=before[source][None] if source >= 0 else None,
            dt_softplus=True,
            return_final_states=True,
        )
        assert_near(made[mine], want[0], 1e-5)
        if target >= 0:
            assert_near(given["states"][target], state[0], 1e-5)


@plain
def test_an_activation_without_a_kernel_is_refused() -> None:
    given = convolution(np.random.default_rng(7), 5, FLOAT32)
    for module in (convolution_torch, convolution_triton):
        with pytest.raises(ValueError, match="no kernel for the activation 'gelu'"):
            module.short_convolution(**given, spans=spans_of("mixed"), activation="gelu")
