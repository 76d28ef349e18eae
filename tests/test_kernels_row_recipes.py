"""Rows of one launch that are each picked by a recipe of their own: as each would be among its like, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from support_kernels import DEVICE, copies, kernel, plain
from support_sampling_cases import (
    NATIVE,
    PAGE,
    assert_near_the_edge,
    bits_of,
    gap,
    keys,
    random_options,
    random_rows,
    rows_of,
)

from hf_batchllm.kernels.lists.sampling_recipes import Recipe, RecipeTable, RowRecipes
from hf_batchllm.kernels.reference import penalties_torch, sample_torch, top_k_top_p_torch
from hf_batchllm.kernels.reference.sample_torch import Rows
from hf_batchllm.kernels.triton import penalties_triton, sample_triton, top_k_top_p_triton

INF, NAN = float("inf"), float("nan")
KINDS = ["normal", "flat", "peaked", "bfloat16", "many ties", "forbidden", "sorted"]


def random_recipes(rng: np.random.Generator, vocabulary: int) -> list[Recipe]:
    """One of them greedy, one that cuts nothing off."""
    made = [Recipe(temperature=0, penalty=1.3), Recipe(temperature=0.8)]
    for _ in range(int(rng.integers(1, 7))):
        made.append(Recipe(**random_options(rng, vocabulary), penalty=float(rng.choice([1.0, 0.7, 1.2]))))
    rng.shuffle(made)  # type: ignore[arg-type]
    return made


def of_rows(recipes: list[Recipe], which: torch.Tensor, vocabulary: int, device: str) -> RowRecipes:
    """In the middle of a larger tensor, as the numbers of rows are: at any address."""
    wide = torch.zeros(len(which) + 3, dtype=torch.int32, device=device)
    wide[3:] = which
    return RowRecipes(RecipeTable(recipes, vocabulary, device), wide[3:])


def drawn_alone(module: Any, logits: torch.Tensor, recipe: Recipe, edge: torch.Tensor, **given: torch.Tensor) -> Any:
    if recipe.temperature == 0:
        return module.greedy(logits)
    return module.gumbel_sample(logits, recipe.temperature, **given, threshold=edge)


def cut_alone(module: Any, logits: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    if recipe.temperature == 0:
        return torch.full((len(logits),), -INF, device=logits.device)
    return module.cutoffs(
        logits, temperature=recipe.temperature, top_k=recipe.top_k, top_p=recipe.top_p, min_p=recipe.min_p
    )


def check_picking(seed: int, vocabulary: int, dtype: torch.dtype, most: int) -> None:
    rng = np.random.default_rng(seed)
    rows, recipes = int(rng.integers(2, most)), random_recipes(rng, vocabulary)
    logits = rows_of(KINDS[seed % len(KINDS)], rows, vocabulary, seed).to(dtype)
    logits[:, 0] = 9.0  # whatever is forbidden, something is left
    if seed % 4 == 0:
        logits[rng.integers(0, rows), rng.integers(0, vocabulary)] = rng.choice([NAN, INF, -INF])
    which = torch.from_numpy(rng.integers(0, len(recipes), rows)).to(torch.int32)
    given = keys(rng, rows)
    narrow = {name: each if name == "seed" else each.to(torch.int32) for name, each in given.items()}
    found = {}
    for name, cut, draw, device in (
        ("references", top_k_top_p_torch, sample_torch, "cpu"),
        ("kernels", top_k_top_p_triton, sample_triton, DEVICE),
    ):
        mine, by_row = logits.to(device), of_rows(recipes, which, vocabulary, device)
        edge = cut.cutoffs(mine, by_row=by_row)
        picked = draw.gumbel_sample(mine, by_row, **copies(narrow, device), threshold=edge)
        for number, recipe in enumerate(recipes):
            own = (which == number).to(device)
            if not own.any():
                continue
            alone = cut_alone(cut, mine[own], recipe)
            assert edge[own].tolist() == alone.tolist(), (name, recipe)
            keys_of = {each: value if each == "seed" else value[own] for each, value in copies(given, device).items()}
            assert picked[own].tolist() == drawn_alone(draw, mine[own], recipe, alone, **keys_of).tolist(), recipe
        found[name] = edge.cpu(), picked.cpu()
    (theirs, want), (ours, got) = found["references"], found["kernels"]
    for row in range(rows):
        recipe = recipes[int(which[row])]
        if ours[row] != theirs[row]:
            assert_near_the_edge(logits[row], float(ours[row]), float(theirs[row]), vars(recipe))
        elif got[row] != want[row]:  # float32 may see two as equal
            assert recipe.temperature > 0
            left = torch.where(logits[row] < theirs[row], -INF, logits[row].float()).double() / recipe.temperature
            mine = {name: each if name == "seed" else each[row : row + 1] for name, each in given.items()}
            assert gap(left, mine, 0, int(got[row]), int(want[row])) < 3e-5


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize(("seed", "vocabulary"), [(1, 1), (0, 37), (1, 4096), (0, 5003)])
def test_picking(vocabulary: int, seed: int) -> None:
    check_picking(seed + 7 * vocabulary, vocabulary, [torch.float32, torch.float16][seed % 2], most=9)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(72))
def test_picking_native(case: int) -> None:
    dtype = torch.float32 if case % 6 in (2, 5) else torch.bfloat16
    check_picking(case, NATIVE[case % 6], dtype, most=[4, 12, 30][case // 6 % 3])


@kernel
def test_greedy_rows_take_the_lowest_of_the_best_and_drawn_ones_need_numbers() -> None:
    logits = torch.zeros(10, 4500)
    logits[0:2, 4400] = NAN
    logits[2:4, 30] = logits[2:4, 4300] = INF
    logits[4:6] = -INF
    logits[6:8, 2100] = logits[6:8, 4000] = 3e30
    which = torch.arange(10, dtype=torch.int32) % 2
    given = keys(np.random.default_rng(0), 10)
    recipes = [Recipe(temperature=0), Recipe(temperature=1.0, top_k=1)]
    for cut, draw, device in ((top_k_top_p_torch, sample_torch, "cpu"), (top_k_top_p_triton, sample_triton, DEVICE)):
        by_row = of_rows(recipes, which, 4500, device)
        edge = cut.cutoffs(logits.to(device), by_row=by_row)
        picked = draw.gumbel_sample(logits.to(device), by_row, **copies(given, device), threshold=edge).tolist()
        assert picked[0:10:2] == [4400, 30, 0, 2100, 0]
        assert picked[1:6:2] == [-1, -1, -1] and picked[7] in (2100, 4000) and picked[9] >= 0


@kernel
def test_rows_of_temperatures_alone_and_rows_that_are_all_greedy() -> None:
    rng = np.random.default_rng(3)
    logits, given = rows_of("normal", 6, 2100, 1), keys(rng, 6)
    which = torch.tensor([0, 1, 0, 1, 1, 0], dtype=torch.int32)
    for recipes in ([Recipe(temperature=0.5), Recipe(temperature=2.0)], [Recipe(temperature=0)] * 2):
        for cut, draw, device in (
            (top_k_top_p_torch, sample_torch, "cpu"),
            (top_k_top_p_triton, sample_triton, DEVICE),
        ):
            by_row, mine = of_rows(recipes, which, 2100, device), logits.to(device)
            assert cut.cutoffs(mine, by_row=by_row).tolist() == [-INF] * 6
            picked = draw.gumbel_sample(mine, by_row, **copies(given, device))
            for number, recipe in enumerate(recipes):
                own = (which == number).to(device)
                mine_keys = copies({k: v if k == "seed" else v[which == number] for k, v in given.items()}, device)
                assert picked[own].tolist() == drawn_alone(draw, mine[own], recipe, None, **mine_keys).tolist()  # type: ignore[arg-type]


@plain
def test_what_is_close_to_nothing_asked_for() -> None:
    """Numbers that float32 rounds to those that ask for nothing still ask for what they ask for."""
    logits = rows_of("normal", 2, 3000, 0)
    for options in ({"top_p": 1 - 1e-12}, {"temperature": 1e30}, {"min_p": 1e-300}, {"top_p": 1e-300}):
        recipes = [Recipe(**options), Recipe(temperature=0)]
        by_row = of_rows(recipes, torch.tensor([0, 1]), 3000, "cpu")
        assert (
            top_k_top_p_torch.cutoffs(logits, by_row=by_row).tolist()[0]
            == top_k_top_p_torch.cutoffs(logits, **options).tolist()[0]
        )
        given = keys(np.random.default_rng(0), 2)
        got = sample_torch.gumbel_sample(logits, by_row, **given).tolist()
        assert got == [
            sample_torch.gumbel_sample(logits, recipes[0].temperature, **given).tolist()[0],
            int(logits[1].argmax()),
        ]


# -- what looks back -------------------------------------------------------------------------------------------


def check_looking_back(seed: int, vocabulary: int, dtype: torch.dtype, most: int) -> None:
    rng = np.random.default_rng(seed)
    rows, recipes = int(rng.integers(2, most)), random_recipes(rng, vocabulary)
    logits = rows_of(["normal", "many ties", "forbidden"][seed % 3], rows, vocabulary, seed).to(dtype)
    logits[rng.integers(0, rows), rng.integers(0, vocabulary)] = rng.choice([NAN, INF, -INF])
    which = torch.from_numpy(rng.integers(0, len(recipes), rows)).to(torch.int32)
    # Rows with a penalty have lines, in any order; more lines are there, which nobody touches.
    penalised = torch.tensor([recipes[number].penalty != 1 for number in which.tolist()])
    line = torch.full((rows,), -1, dtype=torch.int32)
    line[penalised] = torch.from_numpy(rng.permutation(rows + 2)[: int(penalised.sum())]).to(torch.int32)
    tokens = rng.integers(0, vocabulary, (rows + 2, 40)).tolist()
    seen = bits_of(tokens, vocabulary)
    eos = torch.from_numpy(rng.integers(0, vocabulary, (len(recipes), 3)))
    eos[torch.from_numpy(rng.random(eos.shape) < 0.4)] = -1
    made = torch.from_numpy(rng.integers(0, 4, rows)).to(torch.int32)
    minimum = torch.from_numpy(rng.integers(0, 4, rows)).to(torch.int32)
    given: dict[str, Any] = {}
    if seed % 4 != 1:
        given |= {"seen": seen, "line": line}
    if seed % 4 != 2:
        given |= {"eos": eos, "made": made, "minimum": minimum}

    theirs = penalties_torch.penalise(logits, by_row=of_rows(recipes, which, vocabulary, "cpu"), **given)
    by_row = of_rows(recipes, which, vocabulary, DEVICE)
    ours = penalties_triton.penalise(logits.to(DEVICE), by_row=by_row, **copies(given, DEVICE))
    assert torch.equal(ours.cpu().nan_to_num(nan=123.0), theirs.nan_to_num(nan=123.0))
    for row in range(rows):
        number, own = int(which[row]), {}
        if "seen" in given and line[row] >= 0:
            own |= {"seen": seen[line[row]][None], "penalty": recipes[number].penalty}
        if "eos" in given:
            own |= {"eos": eos[number], "made": made[row : row + 1], "minimum": minimum[row : row + 1]}
        alone = penalties_torch.penalise(logits[row : row + 1], **own)
        assert torch.equal(theirs[row : row + 1].nan_to_num(nan=123.0), alone.nan_to_num(nan=123.0))

    new = torch.from_numpy(rng.integers(-1, vocabulary + 1, rows))
    marked = seen.to(DEVICE, copy=True)
    penalties_triton.mark_seen(marked, new.to(DEVICE), vocabulary, line.to(DEVICE))
    penalties_torch.mark_seen(seen, new, vocabulary, line)
    assert torch.equal(marked.cpu(), seen)
    for row in range(rows):
        if line[row] >= 0 and 0 <= new[row] < vocabulary:
            tokens[line[row]].append(int(new[row]))
    assert torch.equal(seen, bits_of(tokens, vocabulary))


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("vocabulary", [1, 31, 4096, 5003])
@pytest.mark.parametrize("seed", range(4))
def test_looking_back(vocabulary: int, seed: int) -> None:
    check_looking_back(seed, vocabulary, [torch.float32, torch.float16][seed // 2], most=7)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(72))
def test_looking_back_native(case: int) -> None:
    dtype = torch.float32 if case % 6 in (0, 5) else torch.bfloat16
    check_looking_back(case, NATIVE[case % 6], dtype, most=[3, 9, 30][case // 6 % 3])


# -- what ends a row -------------------------------------------------------------------------------------------


def check_advance(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    count, sets = int(rng.integers(1, most)), int(rng.integers(1, 5))
    theirs = random_rows(rng, count)
    eos = torch.from_numpy(rng.integers(0, 12, (sets, int(rng.integers(0, 4)))))
    eos[torch.from_numpy(rng.random(eos.shape) < 0.3)] = -1
    which = torch.from_numpy(rng.integers(0, sets, count)).to(torch.int32)
    ours, start = (Rows(*(each.clone() for each in vars(theirs).values())) for _ in range(2))
    ours = ours.to(DEVICE)
    sampled = torch.from_numpy(rng.integers(-1, 12, count))
    sample_triton.advance(ours, sampled.to(DEVICE), eos.to(DEVICE), PAGE, which.to(DEVICE))
    sample_torch.advance(theirs, sampled, eos, PAGE, which)
    for row in range(count):
        alone = Rows(*(each[row : row + 1].clone() for each in vars(start).values()))
        sample_torch.advance(alone, sampled[row : row + 1], eos[which[row]], PAGE)
        for field in dataclasses.fields(Rows):
            want = getattr(alone, field.name)
            assert torch.equal(getattr(theirs, field.name)[row : row + 1], want), field.name
            assert torch.equal(getattr(ours, field.name)[row : row + 1].cpu(), want), field.name


@kernel
@pytest.mark.parametrize("seed", range(8))
def test_advance(seed: int) -> None:
    check_advance(seed, most=100)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(60))
def test_advance_native(case: int) -> None:
    check_advance(case + 50, most=[3, 80, 300][case % 3])
