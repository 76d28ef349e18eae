"""The kernels of mixtures of experts against their references, and the references against transformers' own code."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from support_kernels import DEVICE, draw, kernel, plain
from transformers import AutoConfig

from hf_batchllm.kernels.reference import experts_torch, routing_torch
from hf_batchllm.kernels.reference.experts_torch import Gating
from hf_batchllm.kernels.reference.routing_torch import RowsOfExperts, Rule
from hf_batchllm.kernels.triton import experts_triton, routing_triton

FLOAT32, FLOAT16 = torch.float32, torch.float16
TOLERANCE = {FLOAT32: 1e-5, FLOAT16: 4e-3, torch.bfloat16: 3e-2}  # parts of the largest number
RULES = {
    "softmax": (Rule(3), {}),
    "softmax, as it is": (Rule(2, share="scores"), {}),
    "softmax of the chosen": (Rule(4, "logits", share="softmax"), {}),
    "softmax of some groups": (Rule(3, groups=4, top_groups=2, share="scores", factor=16.0), {}),
    "sigmoid of some groups": (
        Rule(3, "sigmoid", groups=4, top_groups=2, group_best=2, added_to_sum=1e-20, factor=2.5),
        {"bias": True},
    ),
    "sigmoid": (Rule(5, "sigmoid"), {"bias": True}),
    "sigmoid of the chosen": (Rule(3, "logits", share="normalised sigmoid"), {"bias": True}),
    "sigmoid of the chosen, as it is": (Rule(3, "logits", share="sigmoid"), {}),
    "a least sum": (Rule(2, least_sum=0.9), {"bias": True}),
    "a scale for each": (Rule(2), {"scales": True}),
    "one": (Rule(1), {}),
}


def on_device(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if each is None else each.to(DEVICE) for each in tensors]


def assert_same_rows(ours: RowsOfExperts, theirs: RowsOfExperts) -> None:
    """An expert's rows may come in any order."""
    counts = theirs.counts.tolist()
    assert ours.counts.cpu().tolist() == counts and ours.tile == theirs.tile
    assert torch.equal(ours.tiles[:, 0].cpu(), theirs.tiles[:, 0])
    live = theirs.tiles[:, 0] >= 0
    assert torch.equal(ours.tiles.cpu()[live], theirs.tiles[live])
    for expert, count in enumerate(counts):
        assert sorted(ours.pairs[expert, :count].tolist()) == sorted(theirs.pairs[expert, :count].tolist())


# -- routing ---------------------------------------------------------------------------------------------------


@pytest.mark.some_cases("name")
@kernel
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("name", RULES)
def test_choices(name: str, tokens: int, ties: bool) -> None:
    rule, more = RULES[name]
    rng = np.random.default_rng(len(name) + tokens)
    logits = draw(rng, tokens, 24, dtype=FLOAT16 if ties else FLOAT32)
    if ties:
        logits = (logits * 2).round() / 2
    bias = draw(rng, 24, dtype=FLOAT32) * 0.1 if "bias" in more else None
    scales = draw(rng, 24, dtype=FLOAT32).abs() if "scales" in more else None
    (want, shares), rows = routing_torch.choose(logits, rule, 16, FLOAT32, bias, scales)
    given = on_device(logits, bias, scales)
    (got, our_shares), our_rows = routing_triton.choose(given[0], rule, 16, FLOAT32, *given[1:])
    assert torch.equal(got.cpu(), want) and got.dtype == want.dtype
    torch.testing.assert_close(our_shares.cpu(), shares, rtol=1e-5, atol=1e-6)
    assert_same_rows(our_rows, rows)


@kernel
@pytest.mark.parametrize(
    ("tokens", "top", "experts", "tile"), [(1, 1, 1, 16), (300, 2, 5, 16), (64, 4, 128, 32), (1000, 1, 3, 128)]
)
@pytest.mark.parametrize("spread", ["even", "one for all"])
def test_rows_of_experts(tokens: int, top: int, experts: int, tile: int, spread: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator)
    if spread != "even":
        scores = scores[:1].expand(tokens, -1)
    indices = scores.topk(top, dim=-1)[1]
    want = routing_torch.rows_of_experts(indices, experts, tile)
    assert (want.tiles[:, 0] >= 0).sum() == sum(-(-count // tile) for count in want.counts.tolist())
    assert_same_rows(routing_triton.rows_of_experts(indices.to(DEVICE), experts, tile), want)


@kernel
def test_choices_that_no_router_makes() -> None:
    """An expert twice for a token, and experts that are none: they get nothing, as in transformers."""
    rng = np.random.default_rng(3)
    indices = torch.from_numpy(rng.integers(0, 4, (9, 2)))
    indices[indices == 3] = 1
    indices[0], indices[4, 1], indices[5, 0] = 1, 4, -1
    want = routing_torch.rows_of_experts(indices, 4, 16)
    assert_same_rows(routing_triton.rows_of_experts(indices.to(DEVICE), 4, 16), want)
    up, _, down, _ = stacks(rng, 4, 32, 16, FLOAT32)
    given = [draw(rng, 9, 32, dtype=FLOAT32), indices, torch.ones(9, 2), up, None, down, None]
    plain_result = run(experts_torch, routing_torch, given, 4, Gating(), 16)
    got = run(experts_triton, routing_triton, on_device(*given), 4, Gating(), 16).cpu()
    torch.testing.assert_close(got, plain_result, rtol=1e-5, atol=1e-5)
    alone = run(
        experts_torch, routing_torch, [given[0][4:5], indices[4:5, :1], torch.ones(1, 1), *given[3:]], 4, Gating(), 16
    )
    torch.testing.assert_close(plain_result[4:5], alone, rtol=1e-5, atol=1e-5)


@kernel
def test_groups_without_any_score_and_odd_strides() -> None:
    rng = np.random.default_rng(4)
    rule = Rule(3, "sigmoid", groups=4, top_groups=2, group_best=2)
    logits = draw(rng, 16, 7, dtype=FLOAT32).t()[:, ::2]
    bias = torch.zeros(16)[::2]
    bias[[2, 4, 6]] = float("-inf")
    (want, shares), rows = routing_torch.choose(logits, rule, 16, FLOAT32, bias)
    assert not (set(want.flatten().tolist()) & {2, 4, 6})
    given = logits.t().to(DEVICE).t(), bias.to(DEVICE)
    (got, our_shares), our_rows = routing_triton.choose(given[0], rule, 16, FLOAT32, given[1])
    assert torch.equal(got.cpu(), want)
    torch.testing.assert_close(our_shares.cpu(), shares, rtol=1e-5, atol=1e-6)
    assert_same_rows(our_rows, rows)
    made, shares = draw(rng, 10, 24, dtype=FLOAT32), draw(rng, 5, 1, dtype=FLOAT32).expand(-1, 2)
    got = experts_triton.sum_of_shares(made.to(DEVICE), shares.to(DEVICE)).cpu()
    torch.testing.assert_close(got, experts_torch.sum_of_shares(made, shares))


@kernel
def test_nan_stays_nan_beyond_a_limit() -> None:
    rng = np.random.default_rng(5)
    up, up_bias, down, down_bias = stacks(rng, 2, 32, 16, FLOAT32)
    x = draw(rng, 3, 32, dtype=FLOAT32)
    x[1, 0] = float("nan")
    given = [x, torch.tensor([[0], [1], [0]]), torch.ones(3, 1), up, up_bias, down, down_bias]
    gating = Gating("gpt_oss", 1.0, interleaved=True)
    got = run(experts_triton, routing_triton, on_device(*given), 2, gating, 16).cpu()
    assert got[1].isnan().all() and not got[[0, 2]].isnan().any()


@plain
def test_rules_that_do_not_fit() -> None:
    assert Rule(4).fits(4) and not Rule(5).fits(4) and not Rule(0).fits(4)
    assert Rule(4, groups=4, top_groups=2).fits(8) and not Rule(5, groups=4, top_groups=2).fits(8)
    assert not Rule(1, groups=3).fits(8) and not Rule(1, groups=2, top_groups=3).fits(8)


@plain
def test_no_choice_needs_more_tiles() -> None:
    for pairs, experts, tile in ((1, 8, 16), (7, 4, 2), (64, 3, 16), (65, 64, 16)):
        most = routing_torch.most_tiles(pairs, experts, tile)
        # One pair each for all experts but one, which has the rest, and the like.
        for met in range(1, min(pairs, experts) + 1):
            for share in range(1, pairs - met + 2):
                counts = [1] * (met - 1) + [pairs - met + 1]
                if share > 1 and met > 1:
                    counts[0], counts[-1] = share, pairs - met + 2 - share
                assert sum(-(-count // tile) for count in counts if count > 0) <= most


# -- products --------------------------------------------------------------------------------------------------

GATINGS = {
    "silu": Gating(),
    "gelu": Gating("gelu_tanh"),
    "limits": Gating(limit=0.5),
    "gpt-oss": Gating("gpt_oss", 1.0, 1.702, interleaved=True),
    "side by side": Gating(interleaved=True),
}


def stacks(rng: np.random.Generator, experts: int, hidden: int, inter: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Weights and biases of up and down."""
    shapes = (experts, 2 * inter, hidden), (experts, 2 * inter), (experts, hidden, inter), (experts, hidden)
    return [draw(rng, *shape, dtype=dtype) * (0.2 if len(shape) == 3 else 1.0) for shape in shapes]


def run(kernels: Any, routing: Any, given: list[Any], experts: int, gating: Gating, tile: int) -> torch.Tensor:
    x, indices, shares, up, up_bias, down, down_bias = given
    rows = routing.rows_of_experts(indices, experts, tile)
    made = kernels.up_products(x, up, up_bias, rows, indices.shape[1], gating)
    return kernels.sum_of_shares(kernels.down_products(made, down, down_bias, rows), shares)


@pytest.mark.some_cases("name")
@kernel
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
@pytest.mark.parametrize("lies", ["as it is", "turned"])
@pytest.mark.parametrize("name", GATINGS)
def test_products(name: str, lies: str, dtype: torch.dtype) -> None:
    """Sizes that fill no tile; one expert that nobody meets, one that all tokens meet."""
    rng = np.random.default_rng(len(name))
    tokens, experts, hidden, inter, tile = 21, 5, 72, 40, 16
    up, up_bias, down, down_bias = stacks(rng, experts, hidden, inter, dtype)
    if lies == "turned":
        up, down = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (up, down))
    scores = draw(rng, tokens, experts, dtype=FLOAT32)
    scores[:, 2], scores[:, 4] = 9.0, -9.0
    shares, indices = scores.softmax(-1).topk(2)
    biases = (up_bias, down_bias) if name in ("gpt-oss", "gelu") else (None, None)
    shares = shares.to(dtype) if name != "silu" else shares
    given = [draw(rng, tokens, hidden, dtype=dtype), indices, shares, up, biases[0], down, biases[1]]
    want = run(experts_torch, routing_torch, given, experts, GATINGS[name], tile)
    got = run(experts_triton, routing_triton, on_device(*given), experts, GATINGS[name], tile).cpu()
    assert got.dtype == want.dtype and not got.isnan().any()
    error = float((got.double() - want.double()).abs().max() / want.double().abs().max())
    assert error < TOLERANCE[dtype]


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("rows", [4, 30, 90, 200])
def test_products_of_each_size_of_tile(rows: int) -> None:
    """Tokens of one or two experts, so that each expert has about so many rows."""
    rng = np.random.default_rng(rows)
    experts, hidden, inter = 2, 64, 32
    up, _, down, _ = stacks(rng, experts, hidden, inter, FLOAT16)
    indices = torch.from_numpy(rng.integers(0, experts, (2 * rows, 1)))
    given = [draw(rng, 2 * rows, hidden, dtype=FLOAT16), indices, torch.ones(2 * rows, 1), up, None, down, None]
    tile = experts_triton.rows_of_a_tile(indices.numel(), experts, FLOAT16)
    want = run(experts_torch, routing_torch, given, experts, Gating(), tile)
    got = run(experts_triton, routing_triton, on_device(*given), experts, Gating(), tile).cpu()
    assert float((got.double() - want.double()).abs().max() / want.double().abs().max()) < TOLERANCE[FLOAT16]


@plain
@pytest.mark.parametrize("dtype", [FLOAT32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize(("folder", "name"), [("qwen3_moe", "Qwen3MoeExperts"), ("gpt_oss", "GptOssExperts")])
def test_the_references_against_transformers(folder: str, name: str, implementation: str, dtype: torch.dtype) -> None:
    config = AutoConfig.for_model(
        folder, hidden_size=48, intermediate_size=32, moe_intermediate_size=32, num_experts=5, num_local_experts=5
    )
    config._experts_implementation = implementation
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    torch.manual_seed(1)
    experts = getattr(modeling, name)(config).to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(19, 48).to(dtype)
    shares, indices = torch.randn(19, 5).softmax(-1).topk(2)
    own = folder == "gpt_oss"
    gating = Gating("gpt_oss", experts.limit, experts.alpha, interleaved=True) if own else Gating()
    weights = [experts.gate_up_proj, getattr(experts, "gate_up_proj_bias", None)]
    weights += [experts.down_proj, getattr(experts, "down_proj_bias", None)]
    if own:
        weights = [each.transpose(1, 2) if each.ndim == 3 else each for each in weights]
    with torch.no_grad():
        want = experts(x, indices, shares.to(dtype))
        got = run(experts_torch, routing_torch, [x, indices, shares.to(dtype), *weights], 5, gating, 16)
    assert float((got.double() - want.double()).abs().max() / want.double().abs().max()) < TOLERANCE[dtype]
