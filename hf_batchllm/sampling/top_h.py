"""Top-h on the device: the best tokens whose shares of the entropy, added up, stay below a part of it."""

from __future__ import annotations

import torch

MOST_OF_TOP_H = 100  # tokens that transformers looks at, and so the most that stay


def top_h_edges(
    logits: torch.Tensor,  # [rows, vocabulary]
    top_h: torch.Tensor,  # [rows], or [1] for all of them, float32  above 1: nothing is cut off
    temperature: torch.Tensor,  # the same
) -> torch.Tensor:  # [rows] float32
    """The logit from which up a row's tokens stay, as transformers has it; among equals at that edge all do.

    -inf where nothing is cut off, and in rows that hold NaN or infinity: the draw sees to these.
    """
    best, _ = logits.topk(min(MOST_OF_TOP_H, logits.shape[-1]), dim=-1)
    best = best.float()
    weights = (best / temperature[:, None]).softmax(dim=-1)
    terms = torch.where(weights > 0, -weights * weights.log(), 0.0)
    kept = (terms.cumsum(dim=-1) <= (terms.sum(dim=-1) * top_h)[:, None]) & (weights > 0)
    last = (kept.sum(dim=-1) - 1).clamp(min=0)
    edge = best.gather(1, last[:, None])[:, 0]
    return torch.where((top_h > 1) | ~best[:, 0].isfinite(), -torch.inf, edge)
