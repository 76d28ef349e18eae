"""Plain PyTorch references of ``token_edits_triton``: same signatures, same results. They loop over rows."""

from __future__ import annotations

import math

import torch

from ..lists.token_edits import AT_ANY_LENGTH, Decays, Forced, History, TargetLists


def edit_tokens(
    scores: torch.Tensor,  # [rows, vocabulary] float32  is written to
    lists: TargetLists,
    which: torch.Tensor | None,  # [rows] int32  the kind of each row; None: all are of the first
    made: torch.Tensor,  # [rows]  new tokens so far
    history: History | None = None,  # where there are sequences
) -> None:
    """Add to the logits of each row's targets what its kind has for them."""
    kinds = _kinds(which, len(scores))
    begin, sequences, prefix = lists.begin.tolist(), lists.sequences.tolist(), lists.prefix.tolist()
    known = None if history is None else history.known().tolist()
    for row, (kind, length) in enumerate(zip(kinds, made.tolist(), strict=True)):
        for target in range(begin[kind], begin[kind + 1]):
            if int(lists.at[target]) not in (AT_ANY_LENGTH, length):
                continue
            total = lists.bias[target].clone()
            for sequence in range(sequences[target], sequences[target + 1]):
                assert history is not None and known is not None
                wanted = lists.prefix_token[prefix[sequence] : prefix[sequence + 1]]
                first = int(history.begin[row]) + known[row] - len(wanted)
                enough = known[row] >= len(wanted) + lists.spare and int(history.begin[row]) >= 0
                if enough and torch.equal(history.tokens[first : first + len(wanted)], wanted):
                    total += lists.added[sequence]
            token = int(lists.token[target])
            scores[row, token] = total if total == -math.inf else scores[row, token] + total


def ban_repeats(
    scores: torch.Tensor,  # [rows, vocabulary] float32  is written to
    sizes: torch.Tensor,  # [2, kinds] int32  tokens of a stretch that may not come twice; 0: any may
    which: torch.Tensor | None,  # [rows] int32  the kind of each row; None: all are of the first
    history: History,
) -> None:
    """Forbid the tokens that would complete a stretch of so many tokens that a row has had.

    ``sizes[0]`` is of stretches anywhere in the row, ``sizes[1]`` of stretches within its prompt.
    """
    vocabulary = scores.shape[1]
    every = zip(
        _kinds(which, len(scores)), history.begin.tolist(), history.known().tolist(), history.of_prompt.tolist(),
        strict=True,
    )  # fmt: skip
    for row, (kind, begin, known, of_prompt) in enumerate(every):
        if begin < 0:
            continue
        ids = history.tokens[begin : begin + known]
        for size, end in zip(sizes[:, kind].tolist(), (known, of_prompt), strict=True):
            if size and size <= end and known >= size - 1:
                windows = ids[:end].unfold(0, size, 1)
                matching = (windows[:, :-1] == ids[known + 1 - size :]).all(dim=1)
                banned = windows[matching, -1].long()
                scores[row, banned[banned < vocabulary]] = -math.inf


def force_tokens(
    scores: torch.Tensor,  # [rows, vocabulary] float32  is written to
    forced: Forced,
    which: torch.Tensor | None,  # [rows] int32  the kind of each row; None: all are of the first
    made: torch.Tensor,  # [rows]  new tokens so far
    first_at: torch.Tensor,  # [rows]  the length at which the first token is forced; -1: at none
    last_at: torch.Tensor,  # [rows]  the length at which the last tokens are
) -> None:
    """Where a row's token is forced, all others get -inf, and it gets 0."""
    begin = forced.last.begin.tolist()
    every = zip(_kinds(which, len(scores)), made.tolist(), first_at.tolist(), last_at.tolist(), strict=True)
    for row, (kind, length, first, last) in enumerate(every):
        tokens = forced.last.token[begin[kind] : begin[kind + 1]].long()
        token = int(forced.first[kind])
        if length == last and len(tokens):
            scores[row] = -math.inf
            scores[row, tokens] = 0.0
        elif length == first and token >= 0:
            scores[row] = -math.inf
            scores[row, token] = 0.0


def grow_ends(
    scores: torch.Tensor,  # [rows, vocabulary] float32  is written to
    decays: Decays,
    which: torch.Tensor | None,  # [rows] int32  the kind of each row; None: all are of the first
    made: torch.Tensor,  # [rows]  new tokens so far
) -> None:
    """Make it likelier that an answer ends, the longer it is."""
    begin = decays.ends.begin.tolist()
    for row, (kind, length) in enumerate(zip(_kinds(which, len(scores)), made.tolist(), strict=True)):
        beyond = length - int(decays.start[kind])
        tokens = decays.ends.token[begin[kind] : begin[kind + 1]].long()
        if beyond > 0 and len(tokens):
            old = scores[row, tokens]
            growth = decays.growth[kind, min(beyond, decays.growth.shape[1]) - 1]
            scores[row, tokens] = torch.where(old.isfinite(), old + old.abs() * growth, old)


def append_tokens(history: History, tokens: torch.Tensor) -> None:
    """Put each row's new token ([rows] int64) behind those that it has."""
    there = history.begin >= 0
    at = history.begin.long() + history.known()
    history.tokens[at[there]] = tokens[there].int()


def _kinds(which: torch.Tensor | None, rows: int) -> list[int]:
    return [0] * rows if which is None else which.tolist()
