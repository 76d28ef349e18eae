"""The plain PyTorch twin of ``likeliest_triton``: same signature, same results but for rounding."""

from __future__ import annotations

import torch


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
    # Of equals, `topk` takes any. A few more than are asked for, by token: then the sort leaves the lowest first.
    best, tokens = scores.topk(min(k + 16, scores.shape[1]), dim=-1)
    by_token = tokens.argsort(dim=-1)
    best, tokens = best.gather(1, by_token), tokens.gather(1, by_token)
    order = best.argsort(dim=-1, descending=True, stable=True)[:, :k]
    ids[row, place] = tokens.gather(1, order).int()
    values[row, place] = torch.cat([best.gather(1, order) - of_all, chosen], dim=1)
