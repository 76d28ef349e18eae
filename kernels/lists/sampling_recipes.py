"""How a row's token is sampled, as numbers for the kernels: one recipe for all rows, or a table with a line for each.

The numbers are computed here, once, in float64. A kernel gets the same numbers with the launch or from a table, so a
row's token does not depend on the recipes of other rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from .work_lists import sent

BY_RANK, BY_MASS, BY_RATIO = 1, 2, 4  # bits that say which cuts a row has: top-k, top-p, min-p
BEST = -1.0  # the factor of rows that take the best token


@dataclass(frozen=True)
class Recipe:
    """How a token is sampled. As in ``GenerationConfig``, the defaults change nothing."""

    penalty: float = 1.0
    temperature: float = 1.0  # 0: the best token; the fields below are ignored
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None  # these three see what those above have left
    epsilon: float | None = None
    eta: float | None = None
    top_h: float | None = None  # this one sees all, as top-k does

    @property
    def has_typical_eta(self) -> bool:
        """Whether ``typical_eta_cuts`` has anything to do."""
        return self.temperature != 0 and any(each is not None for each in (self.typical_p, self.epsilon, self.eta))

    def cuts(self, vocabulary: int) -> int:
        if self.temperature == 0:
            return 0
        by_rank = self.top_k is not None and 0 < self.top_k < vocabulary
        by_mass = self.top_p is not None and self.top_p < 1
        by_ratio = self.min_p is not None and self.min_p > 0
        return BY_RANK * by_rank + BY_MASS * by_mass + BY_RATIO * by_ratio


class Numbers(NamedTuple):
    """One recipe's numbers for the kernels; or, for a table, a tensor [recipes] in each field."""

    factor: Any  # float32  from logits to the log2 of weights
    cuts: Any  # int32
    top_k: Any  # int32
    top_p: Any  # float32
    log_tail: Any  # float32  log2 of a token's share if all tokens divide evenly what top-p leaves out
    shift: Any  # float32  from the best logit to min-p's edge
    shift_rest: Any  # float32  the rounding error of ``shift``

    @classmethod
    def of(cls, recipe: Recipe, vocabulary: int) -> Numbers:
        cuts = recipe.cuts(vocabulary)
        factor = math.log2(math.e) / recipe.temperature if recipe.temperature else BEST
        top_p = float(recipe.top_p) if cuts & BY_MASS else 1.0  # type: ignore[arg-type]
        tail = max(1 - top_p, 1e-30) / vocabulary if cuts & BY_MASS else 1.0
        shift = shift_of(recipe, vocabulary)
        rounded = torch.tensor(shift, dtype=torch.float32, device="cpu").item()
        rest = shift - rounded if cuts & BY_RATIO else 0.0
        return cls(factor, cuts, recipe.top_k if cuts & BY_RANK else 0, top_p, math.log2(tail), rounded, rest)


def shift_of(recipe: Recipe, vocabulary: int) -> float:
    """The distance from the best logit to min-p's edge; -inf where min-p cuts nothing off."""
    asked = recipe.min_p is not None and recipe.cuts(vocabulary) & BY_RATIO
    return recipe.temperature * math.log(recipe.min_p) if asked else -math.inf  # type: ignore[arg-type]


class RecipeTable:
    """Several recipes on a device. ``cuts``: how any of them cut; ``takes_best``: whether any is greedy."""

    def __init__(self, recipes: Sequence[Recipe], vocabulary: int, device: torch.device | str) -> None:
        self._recipes = recipes
        self._vocabulary = vocabulary
        self._device = device
        every = [Numbers.of(recipe, vocabulary) for recipe in recipes]
        self.cuts = frozenset(numbers.cuts for numbers in every)
        self.takes_best = not all(recipe.temperature for recipe in recipes)
        columns = []
        for name, column in zip(Numbers._fields, zip(*every, strict=True), strict=True):
            columns.append(self._tensor(column, torch.int32 if name in ("cuts", "top_k") else torch.float32))
        self.numbers = Numbers(*columns)
        self.penalty = self._tensor([recipe.penalty for recipe in recipes], torch.float32)
        self.has_typical = any(recipe.has_typical_eta and recipe.typical_p is not None for recipe in recipes)

    @cached_property
    def typical_eta(self) -> torch.Tensor:  # [3, recipes] float32
        """For ``typical_eta_cuts``: typical-p, epsilon and eta; 0 where a recipe has none."""
        columns = [
            [
                0.0 if value is None or not recipe.temperature else value
                for recipe, value in zip(self._recipes, values, strict=True)
            ]
            for values in zip(
                *((recipe.typical_p, recipe.epsilon, recipe.eta) for recipe in self._recipes), strict=True
            )
        ]
        return self._tensor(columns, torch.float32)

    # For the references, in float64, as exact as Python's own numbers.

    @cached_property
    def temperature(self) -> torch.Tensor:
        return self._tensor([recipe.temperature for recipe in self._recipes], torch.float64)

    @cached_property
    def top_p(self) -> torch.Tensor:
        chosen = [1.0 if recipe.top_p is None else recipe.top_p for recipe in self._recipes]
        return self._tensor(chosen, torch.float64)

    @cached_property
    def shift(self) -> torch.Tensor:
        return self._tensor([shift_of(recipe, self._vocabulary) for recipe in self._recipes], torch.float64)

    def _tensor(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):  # steps may run outside of inference mode
            # Without waiting: the table is made when the first step is on its way.
            return sent(torch.tensor(list(values), dtype=dtype, device="cpu"), self._device)


@dataclass(frozen=True)
class RowRecipes:
    """The recipe of each row."""

    table: RecipeTable
    which: torch.Tensor  # [rows] int32

    @classmethod
    def same(cls, recipe: Recipe, logits: torch.Tensor) -> RowRecipes:
        """One for all rows of ``logits``."""
        which = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        return cls(RecipeTable([recipe], logits.shape[1], logits.device), which)
