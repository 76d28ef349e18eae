"""Plain references of ``routing_triton``: same signatures, same results but for the order of an expert's rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

SCORES = ("softmax", "sigmoid", "logits")
SHARES = ("scores", "normalised", "softmax", "sigmoid", "normalised sigmoid")


@dataclass(frozen=True)
class Rule:
    """How a router goes from logits to the experts of a token and to the share of each. All of it is in float32."""

    top: int
    score: str = "softmax"  # of the logits, over all experts
    groups: int = 1  # of experts that stand side by side; a token's experts come from ``top_groups`` of them
    top_groups: int = 1
    group_best: int = 1  # a group is as good as the sum of so many of its best: 1 or 2
    # From the scores of those chosen: as they are; divided by their sum; their softmax; their sigmoids, or those
    # divided by their sum.
    share: str = "normalised"
    least_sum: float = 0.0  # by which is divided, at least
    added_to_sum: float = 0.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.score not in SCORES or self.share not in SHARES or self.group_best not in (1, 2):
            raise ValueError(f"there is no such rule: {self}")

    def fits(self, experts: int) -> bool:
        """Whether so many experts can be chosen from by it; what a model's own code does elsewhere is its own."""
        if min(self.groups, self.top_groups) < 1 or self.top_groups > self.groups or experts % self.groups:
            return False
        each = experts // self.groups
        return 0 < self.top <= self.top_groups * each and (self.groups == 1 or self.group_best <= each)


class Choice(NamedTuple):
    indices: torch.Tensor  # [tokens, top] int64, as torch's own top-k gives them
    shares: torch.Tensor  # [tokens, top]


@dataclass(frozen=True)
class RowsOfExperts:
    """Which rows each expert has, and the tiles into which they are cut.

    A *pair* is one choice of one token: pair ``token * top + nth``. The rest of ``tiles`` has the expert -1.
    """

    pairs: torch.Tensor  # [experts, most of one] int32; the first ``counts[expert]`` are an expert's, in any order
    counts: torch.Tensor  # [experts] int32
    tiles: torch.Tensor  # [most, 2] int32  expert, first place among its pairs
    tile: int  # rows of a tile
    total: int  # pairs of all tokens
    whole: bool  # whether each pair has an expert


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """No choice of experts needs more: each expert that is met has one tile that is not full."""
    met = min(pairs, experts)
    return met + (pairs - met) // tile


def rows_of_experts(indices: torch.Tensor, experts: int, tile: int) -> RowsOfExperts:  # indices [tokens, top]
    """The rows of experts chosen elsewhere. A token may have one twice, or one that is none and gives nothing."""
    flat = indices.reshape(-1)
    pairs = torch.full((experts, flat.numel()), -1, dtype=torch.int32, device=flat.device)
    known = flat[(flat >= 0) & (flat < experts)]
    counts = torch.bincount(known, minlength=experts).to(torch.int32)
    tiles = torch.full((most_tiles(flat.numel(), experts, tile), 2), -1, dtype=torch.int32, device=flat.device)
    at = 0
    for expert in range(experts):
        own = (flat == expert).nonzero()[:, 0].to(torch.int32)
        pairs[expert, : len(own)] = own
        for first in range(0, len(own), tile):
            tiles[at, 0], tiles[at, 1], at = expert, first, at + 1
    return RowsOfExperts(pairs, counts, tiles, tile, flat.numel(), whole=False)


def choose(
    logits: torch.Tensor,  # [tokens, experts]
    rule: Rule,
    tile: int,
    dtype: torch.dtype,  # of the shares
    bias: torch.Tensor | None = None,  # [experts]  is added to scores where experts are compared, and nowhere else
    scales: torch.Tensor | None = None,  # [experts]  multiplies shares, in float32
) -> tuple[Choice, RowsOfExperts]:
    """Among equals, the first experts are chosen."""
    (tokens, experts), wide = logits.shape, logits.float()
    scores = {"softmax": lambda: wide.softmax(-1), "sigmoid": wide.sigmoid, "logits": lambda: wide}[rule.score]()
    compared = scores if bias is None else scores + bias.float()
    if rule.groups > 1:
        grouped = compared.view(tokens, rule.groups, -1)
        best = grouped.topk(rule.group_best, dim=-1)[0].sum(-1)
        chosen = _first_best(best, rule.top_groups)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
        compared = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).view(tokens, experts)
    indices = _first_best(compared, rule.top)
    shares = scores.gather(1, indices)
    if rule.share.endswith("sigmoid"):
        shares = shares.sigmoid()
    if rule.share.startswith("normalised"):
        shares = shares / (shares.sum(-1, keepdim=True) + rule.added_to_sum).clamp(min=rule.least_sum)
    elif rule.share == "softmax":
        shares = shares.softmax(-1)
    shares = shares * rule.factor
    if scales is not None:
        shares = shares * scales.float()[indices]
    rows = rows_of_experts(indices, experts, tile)
    return Choice(indices, shares.to(dtype)), replace(rows, pairs=rows.pairs[:, :tokens], whole=True)


def _first_best(values: torch.Tensor, count: int) -> torch.Tensor:
    return values.sort(dim=-1, descending=True, stable=True)[1][:, :count]
