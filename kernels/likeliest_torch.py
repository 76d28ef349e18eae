"""The plain PyTorch twin of ``likeliest_triton``: same signature, same results but for rounding."""

from __future__ import annotations

import torch

_MORE = 16  # are looked at than are asked for, so that those which are as good as the last one are among them


def note_likeliest(
    logits: torch.Tensor,  # [rows, vocabulary]
    picked: torch.Tensor,  # [rows] int64  -1: none, whose log-probability is NaN
    ids: torch.Tensor,  # [rows, places, k] int32  gets the k likeliest tokens, the lowest first among equals
    values: torch.Tensor,  # [rows, places, k + 1] float32  gets their log-probabilities, then that of the picked token
    made: torch.Tensor | None = None,  # [rows]  each row's place is this, modulo ``places``; None: the only place
) -> None:
    """Write the log-probabilities (of the logits as they are) of each row's token and its ``k`` likeliest ones."""
    rows, places, k = ids.shape
    row = torch.arange(rows, device=logits.device)
    place = row * 0 if made is None else made.long() % places
    scores = logits.float()
    of_all = scores.logsumexp(dim=-1, keepdim=True)
    chosen = scores.gather(1, picked.clamp(min=0)[:, None]) - of_all
    chosen = torch.where(picked[:, None] < 0, float("nan"), chosen)
    if not k:
        values[row, place] = chosen
        return
    best, tokens = likeliest(scores, k)
    ids[row, place] = tokens.int()
    values[row, place] = torch.cat([best - of_all, chosen], dim=1)


def likeliest(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, k], [rows, k]
    """The ``k`` best of each row of ``scores`` [rows, vocabulary] and their tokens, the lowest first among equals.

    Of equals, ``topk`` takes any: which ones, may depend on other rows.
    """
    best, tokens = _lowest_first(*scores.topk(min(k + _MORE, scores.shape[1]), dim=-1))
    if best.shape[1] < scores.shape[1]:
        (unsure,) = (best[:, k - 1] == best[:, -1]).nonzero(as_tuple=True)  # more are as good than were looked at
        if len(unsure):
            order = scores[unsure].sort(dim=-1, descending=True, stable=True)
            best[unsure], tokens[unsure] = order.values[:, : best.shape[1]], order.indices[:, : best.shape[1]]
    return best[:, :k], tokens[:, :k]


def _lowest_first(best: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    by_token = tokens.argsort(dim=-1)
    best, tokens = best.gather(1, by_token), tokens.gather(1, by_token)
    order = best.argsort(dim=-1, descending=True, stable=True)
    return best.gather(1, order), tokens.gather(1, order)
