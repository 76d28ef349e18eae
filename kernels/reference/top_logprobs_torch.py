"""The plain PyTorch reference of ``top_logprobs_triton``: same signature, same results but for rounding."""

from __future__ import annotations

import torch

_MORE = 16  # are looked at than are asked for, so that those which are as good as the last one are among them


def note_top_logprobs(
    logits: torch.Tensor,  # [rows, vocabulary]
    picked: torch.Tensor,  # [rows] int64  -1: none, whose log-probability is NaN
    ids: torch.Tensor,  # [rows, places, k] int32  gets the k most likely tokens, the lowest first among equals
    values: torch.Tensor,  # [rows, places, k + 1] float32  gets their log-probabilities, then that of the picked token
    made: torch.Tensor | None = None,  # [rows]  each row's place is this, modulo ``places``; None: the only place
) -> None:
    """Write the log-probabilities (of the logits as they are) of each row's token and its ``k`` most likely ones."""
    rows, places, k = ids.shape
    row = torch.arange(rows, device=logits.device)
    place = row * 0 if made is None else made.long() % places
    scores = logits.float()
    lone = rows == 1 and logits.device.type == "cpu"  # which a CPU adds up in another order
    of_all = (scores.expand(2, -1) if lone else scores).logsumexp(dim=-1, keepdim=True)[:rows]
    chosen = scores.gather(1, picked.clamp(min=0)[:, None]) - of_all
    chosen = torch.where(picked[:, None] < 0, float("nan"), chosen)
    if not k:
        values[row, place] = chosen
        return
    best, tokens = most_likely(scores, k)
    ids[row, place] = tokens.int()
    values[row, place] = torch.cat([best - of_all, chosen], dim=1)


def most_likely(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, k], [rows, k]
    """The ``k`` best of each row of ``scores`` [rows, vocabulary] and their tokens, the lowest first among equals.

    Of equals, ``topk`` takes any: which ones, may depend on other rows.
    """
    if k == 1:
        tokens = scores.argmax(dim=-1, keepdim=True)  # of equals the lowest one
        return scores.gather(1, tokens), tokens
    best, tokens = _lowest_first(*scores.topk(min(k + _MORE, scores.shape[1]), dim=-1))
    if best.shape[1] < scores.shape[1]:
        # More are as good than were looked at.
        (unsure,) = ((best[:, k - 1] == best[:, -1]) & (best[:, k - 1] > -torch.inf)).nonzero(as_tuple=True)
        if len(unsure):
            order = scores[unsure].sort(dim=-1, descending=True, stable=True)
            best[unsure], tokens[unsure] = order.values[:, : best.shape[1]], order.indices[:, : best.shape[1]]
    best, tokens = best[:, :k], tokens[:, :k]
    if bool((best[:, -1] == -torch.inf).any()):  # where little is left to choose from, thousands are as bad
        lowest_first = torch.arange(scores.shape[1], 0, -1, device=scores.device, dtype=torch.int32)
        gone = lowest_first.expand_as(scores).masked_fill(scores > -torch.inf, 0).topk(k, dim=-1).indices
        left = (best > -torch.inf).sum(dim=-1, keepdim=True)
        nth = torch.arange(k, device=scores.device)
        tokens = torch.where(nth < left, tokens, gone.gather(1, (nth - left).clamp(min=0)))
    return best, tokens


def _lowest_first(best: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    by_token = tokens.argsort(dim=-1)
    best, tokens = best.gather(1, by_token), tokens.gather(1, by_token)
    order = best.argsort(dim=-1, descending=True, stable=True)
    return best.gather(1, order), tokens.gather(1, order)
