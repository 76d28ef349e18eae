"""The reference of ``typical_eta_triton``: same signature, same results but for the rounding of masses."""

from __future__ import annotations

import math

import torch

from ..lists.sampling_recipes import RecipeTable


def typical_eta_cuts(
    logits: torch.Tensor,  # [rows, vocabulary]
    table: RecipeTable,
    which: torch.Tensor | None,  # [rows] int32  each row's recipe; None: all have the first
    threshold: torch.Tensor | None = None,  # [rows] float32  tokens with a logit below it have been cut off before
) -> tuple[torch.Tensor, torch.Tensor]:  # [rows] float32, twice
    """The lowest and the highest logit that stay after typical-p, epsilon and eta one after the other.

    Typical-p keeps the tokens whose surprise is nearest to what is to be expected, until their mass reaches it. Epsilon
    keeps tokens at least that likely, and so does eta, which is lower where the distribution is flat; both keep the
    best. Rows that hold NaN or infinity, or nothing but -inf, are left as they are.
    """
    rows, vocabulary = logits.shape
    which = torch.zeros(rows, dtype=torch.int32, device=logits.device) if which is None else which
    scores = logits.float()
    low = scores.new_full((rows,), -math.inf) if threshold is None else threshold.clone()
    high = torch.full_like(low, math.inf)
    typical, epsilon, eta = table.typical_eta[:, which].double()
    temperature = table.temperature[which]
    best = scores.amax(dim=-1) if vocabulary else low
    sound = best.isfinite() & (temperature > 0)
    wide = scores.double()
    warmth = torch.where(sound, temperature, 1.0)[:, None]

    def left() -> tuple[torch.Tensor, torch.Tensor]:
        """Which tokens are left, and their log-probabilities."""
        stays = (scores >= low[:, None]) & (scores <= high[:, None]) & (scores > -math.inf)
        return stays, torch.where(stays, wide / warmth, -math.inf).log_softmax(dim=-1)

    def entropy(stays: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
        return -torch.where(stays, logp.exp() * logp, 0.0).sum(dim=-1)

    def raise_low(at: torch.Tensor, asked: torch.Tensor, stays: torch.Tensor, logp: torch.Tensor) -> None:
        """Keep what has at least this log-probability, and the best."""
        top = torch.where(stays, scores, -math.inf).amax(dim=-1)
        kept = torch.where(stays & (logp >= at[:, None]), scores, math.inf).amin(dim=-1)
        low[:] = torch.where(asked, torch.maximum(low, torch.minimum(kept, top)), low)

    asked = sound & (typical > 0)
    if asked.any():
        stays, logp = left()
        distance = torch.where(stays, (-logp - entropy(stays, logp)[:, None]).abs(), math.inf)
        ordered, order = distance.sort(dim=-1)
        mass = logp.exp().gather(1, order).cumsum(dim=-1)
        reached = (mass < typical[:, None]).sum(dim=-1).clamp(max=vocabulary - 1)
        kept = stays & (distance <= ordered.gather(1, reached[:, None]))
        low = torch.where(asked, torch.where(kept, scores, math.inf).amin(dim=-1), low)
        high = torch.where(asked, torch.where(kept, scores, -math.inf).amax(dim=-1), high)
    asked = sound & (epsilon > 0)
    if asked.any():
        raise_low(epsilon.clamp(min=1e-300).log(), asked, *left())
    asked = sound & (eta > 0)
    if asked.any():
        stays, logp = left()
        floor = eta.clamp(min=1e-300).log()
        raise_low(torch.minimum(floor, floor / 2 - entropy(stays, logp)), asked, stays, logp)
    return low, high
