"""Typical-p, epsilon and eta without sorting: against transformers' warpers, and kernels against their reference."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from support_kernels import DEVICE, kernel
from transformers.generation.logits_process import EpsilonLogitsWarper, EtaLogitsWarper, TypicalLogitsWarper

from hf_batchllm.kernels.lists.sampling_recipes import Recipe, RecipeTable
from hf_batchllm.kernels.reference import typical_eta_torch
from hf_batchllm.kernels.triton import typical_eta_triton

INF = float("inf")


def rows_of(kind: str, rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, vocabulary, generator=generator) * {"flat": 0.6, "peaked": 4.0}.get(kind, 2.0)
    if kind == "ties":
        scores = (scores * 2).round() / 2
    if kind == "equal":
        scores = torch.zeros(rows, vocabulary)
    if kind == "forbidden":
        scores[torch.rand(rows, vocabulary, generator=generator) < 0.5] = -INF
        scores[:, 1] = 0.5
    return scores


KINDS = ["flat", "peaked", "ties", "forbidden", "equal"]
RECIPES = [
    {"typical_p": 0.2}, {"typical_p": 0.9}, {"epsilon": 0.01}, {"eta": 0.02}, {"epsilon": 0.9}, {"eta": 0.5},
    {"typical_p": 0.95, "epsilon": 1e-3, "eta": 2e-3}, {"typical_p": 0.7, "eta": 0.3}, {},
]  # fmt: skip


def left_by(
    module: Any, scores: torch.Tensor, recipe: dict[str, Any], temperature: float, **given: Any
) -> torch.Tensor:
    table = RecipeTable([Recipe(temperature=temperature, **recipe)], scores.shape[1], scores.device)
    low, high = module.typical_eta_cuts(scores, table, None, **given)
    return ((scores.float() >= low[:, None]) & (scores.float() <= high[:, None]) & (scores > -INF)).cpu()


@pytest.mark.some_cases
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_reference_is_as_transformers(recipe: dict[str, Any], kind: str, temperature: float) -> None:
    for seed, vocabulary in enumerate([5, 97, 800]):
        scores = rows_of(kind, 6, vocabulary, seed)
        wanted = scores.double() / temperature
        for name, warper in (
            ("typical_p", TypicalLogitsWarper), ("epsilon", EpsilonLogitsWarper), ("eta", EtaLogitsWarper)
        ):  # fmt: skip
            if name in recipe:
                wanted = warper(recipe[name])(None, wanted)
        got = left_by(typical_eta_torch, scores, recipe, temperature)
        assert torch.equal(got, wanted > -INF)


def check(seed: int, kind: str, rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    """A token right at an edge may fall on either side, and so do all that are equal to it."""
    rng = random.Random(seed)
    scores = rows_of(kind, rows, vocabulary, seed).to(dtype)
    if rng.random() < 0.3:
        scores[rng.randrange(rows), rng.randrange(vocabulary)] = rng.choice([float("nan"), INF, -INF])
    recipes = [Recipe(temperature=rng.choice([0.7, 1.0, 1.4]), **recipe) for recipe in RECIPES]
    recipes.append(Recipe(temperature=0, typical_p=0.5))
    which = torch.tensor([rng.randrange(len(recipes)) for _ in range(rows)], dtype=torch.int32)
    threshold = (
        None if seed % 2 else scores.float().quantile(0.3, dim=1).nan_to_num(nan=-INF) if vocabulary < 9999 else None
    )
    results = []
    for module, where in ((typical_eta_torch, "cpu"), (typical_eta_triton, DEVICE)):
        given = None if threshold is None else threshold.to(where)
        low, high = module.typical_eta_cuts(
            scores.to(where), RecipeTable(recipes, vocabulary, where), which.to(where), given
        )
        results.append((low.cpu(), high.cpu()))
    (their_low, their_high), (low, high) = results
    for row, recipe in enumerate(recipes[number] for number in which.tolist()):
        bare, warmth = scores[row].float(), max(recipe.temperature, 1e-3)
        mine, its = ((bare >= a[row]) & (bare <= b[row]) for a, b in ((low, high), (their_low, their_high)))
        odd = (mine != its) & (bare > -INF)
        if odd.any():  # by rounding alone
            assert recipe.has_typical_eta and len(set(bare[odd].tolist())) <= 2
            values = sorted({*bare[odd].tolist()})
            weights = ((bare.double() - bare.double().max()) / warmth).exp()
            inside = [float(weights[its].sum()), float(weights[mine].sum())]
            assert values and math.isclose(inside[0], inside[1], rel_tol=0.2)
    assert float(torch.isclose(low, their_low, atol=1e-4).float().mean()) > 0.7


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [7, 5003])
def test_the_kernel(kind: str, vocabulary: int) -> None:
    for seed in range(2):
        check(seed, kind, 8, vocabulary, [torch.float32, torch.float16][seed])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_the_kernel_natively(seed: int) -> None:
    rng = random.Random(seed)
    dtype = rng.choice([torch.float32, torch.bfloat16])
    check(seed, rng.choice(KINDS), rng.randint(1, 60), rng.choice([97, 5003, 32_000, 151_936]), dtype)
