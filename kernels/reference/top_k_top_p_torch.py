"""Plain PyTorch references of ``top_k_top_p_triton``: same signatures, same results but for the rounding of masses."""

from __future__ import annotations

import math

import torch

from ..lists.sampling_recipes import BY_MASS, BY_RANK, BY_RATIO, Recipe, RowRecipes


def cutoffs(
    logits: torch.Tensor,  # [rows, vocabulary]
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    by_row: RowRecipes | None = None,  # in place of all of these
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [rows] float32
    """The logit from which up a row's tokens stay, after top-k, top-p and min-p one after the other, as transformers'.

    Top-k keeps all that are as good as the k-th best. Top-p keeps the fewest of the best tokens, of those that top-k
    left, whose mass reaches ``top_p``, one at least; among equals at that edge it keeps all, where transformers keeps
    some, whichever its sort puts first. Min-p keeps what is at least ``min_p`` times as likely as the best token.
    Masses are sums in float64.

    -inf where nothing is cut off, and in rows that hold NaN or infinity, or nothing but -inf: the draw sees to these.
    """
    rows, vocabulary = logits.shape
    if by_row is None:
        recipe = Recipe(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        by_row = RowRecipes.same(recipe, logits)
    table, which = by_row.table, by_row.which
    cuts = table.numbers.cuts[which]
    by_rank, by_mass, by_ratio = ((cuts & bit > 0)[:, None] for bit in (BY_RANK, BY_MASS, BY_RATIO))
    temperatures = torch.where(cuts > 0, table.temperature[which], 1.0)[:, None]
    scores = logits.float()
    edge = scores.new_full((rows, 1), -math.inf)
    best = scores.amax(dim=-1, keepdim=True) if vocabulary else edge  # NaN where a score is
    ordered = scores.sort(dim=-1, descending=True).values if (by_rank | by_mass).any() else scores
    if by_rank.any():
        rank = table.numbers.top_k[which].long().clamp(min=1) - 1
        edge = torch.where(by_rank, ordered.gather(1, rank[:, None]), edge)
    if by_mass.any():
        weights = ((ordered - best).double() / temperatures).exp()
        mass = torch.where(ordered >= edge, weights, 0.0).cumsum(dim=-1)
        reached = mass >= (mass[:, -1:] * table.top_p[which][:, None]).clamp(min=1e-30)
        nucleus = ordered.gather(1, reached.int().argmax(dim=-1, keepdim=True))
        edge = torch.where(by_mass, torch.maximum(edge, nucleus), edge)
    if by_ratio.any():
        exact = best.double() + table.shift[which][:, None]
        rounded = exact.float()
        above = torch.nextafter(rounded, torch.full_like(rounded, math.inf))
        edge = torch.where(by_ratio, torch.maximum(edge, torch.where(rounded.double() < exact, above, rounded)), edge)
    edge = torch.where(best.isfinite(), edge, -math.inf)[:, 0]
    return edge if out is None else out.copy_(edge)
