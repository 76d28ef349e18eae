"""Plain PyTorch references of ``penalties_triton``: same signatures, same results."""

from __future__ import annotations

import math

import torch

from ..lists.sampling_recipes import RowRecipes

WORD = 32  # tokens in each word of a row's bits


def penalise(
    logits: torch.Tensor,  # [rows, vocabulary]
    *,
    seen: torch.Tensor
    | None = None,  # [lines, vocabulary / 32, rounded up] int32, a bit for each token; None: no penalty
    line: torch.Tensor | None = None,  # [rows] int32  each row's line, -1 for none; by default line i is row i's
    penalty: float = 1.0,
    by_row: RowRecipes | None = None,  # with penalties in place of ``penalty``
    eos: torch.Tensor | None = None,  # [any] int64, or [recipes, any] if ``by_row``; None: a row may end at any length
    made: torch.Tensor | None = None,  # [rows]  tokens generated so far
    minimum: torch.Tensor | None = None,  # [rows]  tokens to generate before a token of ``eos`` may come
    out: torch.Tensor | None = None,  # [rows, vocabulary] float32  may be ``logits`` itself
) -> torch.Tensor:  # [rows, vocabulary] float32
    """Logits after the repetition penalty of the tokens seen, and without EOS in rows that are not long enough yet."""
    rows, vocabulary = logits.shape
    scores = logits.float()
    token = torch.arange(vocabulary, device=logits.device)
    if seen is not None:
        factor = scores.new_tensor(penalty) if by_row is None else by_row.table.penalty[by_row.which][:, None]
        line = torch.arange(rows, device=logits.device) if line is None else line
        bits = torch.where((line >= 0)[:, None], seen[line.clamp(min=0)], 0)
        marked = (bits[:, token // WORD] >> (token % WORD) & 1).bool()
        scores = torch.where(marked, torch.where(scores < 0, scores * factor, scores / factor), scores)
    if eos is not None:
        assert made is not None and minimum is not None
        ends = eos[None] if by_row is None else eos[by_row.which]  # [1 or rows, any]
        is_end = (token[None, :, None] == ends[:, None, :]).any(dim=-1)
        scores = torch.where((made < minimum)[:, None] & is_end, -math.inf, scores)
    return scores.clone() if out is None else out.copy_(scores)


def mark_seen(
    seen: torch.Tensor,  # [lines, words] int32
    tokens: torch.Tensor,  # [rows] or [rows, any] int64  negative: no token
    vocabulary: int,
    line: torch.Tensor | None = None,  # [rows] int32  as for ``penalise``
) -> None:
    """Set the bits of each row's tokens; those beyond the vocabulary have none."""
    rows = torch.arange(len(tokens), device=tokens.device) if line is None else line.long()
    for token in tokens.reshape(len(tokens), -1).T:
        real = (token >= 0) & (token < vocabulary) & (rows >= 0)
        at, row = token[real], rows[real]
        seen[row, at // WORD] |= torch.ones_like(at, dtype=seen.dtype) << (at % WORD).to(seen.dtype)
