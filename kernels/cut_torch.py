"""Plain PyTorch twins of ``cut_triton``: same signatures, same results but for the rounding of masses."""

from __future__ import annotations

import math

import torch

WORD = 32  # tokens in each word of a row's bits


def cutoffs(
    logits: torch.Tensor,  # [rows, vocabulary]
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
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
    scores = logits.float()
    best = scores.amax(dim=-1) if vocabulary else scores.new_full((rows,), -math.inf)  # NaN where a score is
    edge = scores.new_full((rows,), -math.inf)
    ordered = scores
    if (top_k is not None and 0 < top_k < vocabulary) or (top_p is not None and top_p < 1):
        ordered = scores.sort(dim=-1, descending=True).values
    if top_k is not None and 0 < top_k < vocabulary:
        edge = ordered[:, top_k - 1]
    if top_p is not None and top_p < 1:
        weights = ((ordered - best[:, None]).double() / temperature).exp()
        mass = torch.where(ordered >= edge[:, None], weights, 0.0).cumsum(dim=-1)
        reached = mass >= (mass[:, -1:] * top_p).clamp(min=1e-30)
        edge = torch.maximum(edge, ordered.gather(1, reached.int().argmax(dim=-1, keepdim=True))[:, 0])
    if min_p is not None and min_p > 0:
        exact = best.double() + temperature * math.log(min_p)
        rounded = exact.float()
        above = torch.nextafter(rounded, torch.full_like(rounded, math.inf))
        edge = torch.maximum(edge, torch.where(rounded.double() < exact, above, rounded))
    edge = torch.where(best.isfinite(), edge, -math.inf)
    return edge if out is None else out.copy_(edge)


def penalise(
    logits: torch.Tensor,  # [rows, vocabulary]
    *,
    seen: torch.Tensor
    | None = None,  # [rows, vocabulary / 32, rounded up] int32, a bit for each token; None: no penalty
    penalty: float = 1.0,
    eos: torch.Tensor | None = None,  # [any] int64; None: a row may end at any length
    made: torch.Tensor | None = None,  # [rows]  tokens generated so far
    minimum: torch.Tensor | None = None,  # [rows]  how many they have to be before a token of ``eos`` may come
    out: torch.Tensor | None = None,  # [rows, vocabulary] float32  may be ``logits`` itself
) -> torch.Tensor:  # [rows, vocabulary] float32
    """Logits after the repetition penalty of the tokens seen, and without EOS in rows that are not long enough yet."""
    vocabulary = logits.shape[1]
    scores = logits.float()
    token = torch.arange(vocabulary, device=logits.device)
    if seen is not None:
        marked = (seen[:, token // WORD] >> (token % WORD) & 1).bool()
        scores = torch.where(marked, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    if eos is not None:
        assert made is not None and minimum is not None
        scores = torch.where((made < minimum)[:, None] & torch.isin(token, eos), -math.inf, scores)
    return scores.clone() if out is None else out.copy_(scores)


def mark_seen(
    seen: torch.Tensor,  # [rows, words] int32
    tokens: torch.Tensor,  # [rows] or [rows, any] int64  negative ones are none
    vocabulary: int,
) -> None:
    """Set the bits of each row's tokens; those beyond the vocabulary have none."""
    for token in tokens.reshape(len(seen), -1).T:
        real = (token >= 0) & (token < vocabulary)
        where = token.clamp(0, vocabulary - 1)
        word = seen.gather(1, where[:, None] // WORD)[:, 0]
        bit = torch.ones_like(word) << (where % WORD).to(word.dtype)
        seen.scatter_(1, where[:, None] // WORD, torch.where(real, word | bit, word)[:, None])
