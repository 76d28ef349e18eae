"""Passes through a model of the same number of rows each, so that a row's numbers do not depend on how many there are.

A CPU's matrix products add up in another order for another number of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .batch import ModelBatch
from .fixed_attention import ROWS, FixedAttention, FixedBackend

Forward = Callable[[torch.Tensor, torch.Tensor, FixedAttention, torch.Tensor], torch.Tensor]


def in_fixed_passes(forward: Forward, backend: FixedBackend, batch: ModelBatch) -> torch.Tensor:
    """The logits of a step, [samples + asked, vocabulary].

    forward: of ids, positions, attention and the rows whose logits are wanted.
    """
    tokens, logits = batch.tokens, None
    wanted = tokens.logits_rows
    every, none = torch.arange(ROWS, device=wanted.device), wanted.new_zeros(1)
    backend.threads.begin()
    try:
        for attention in backend.passes(batch.attention):
            rows = slice(attention.begin, attention.end)
            mine = ((wanted >= attention.begin) & (wanted < attention.end)).nonzero()[:, 0]
            given = _filled(tokens.input_ids[rows]), _filled(tokens.position_ids[rows])
            found = forward(*given, attention, every if len(mine) else none)
            if len(mine):
                if logits is None:
                    logits = found.new_empty(len(wanted), found.shape[1])
                logits[mine] = found[wanted[mine] - attention.begin]
    finally:
        backend.threads.restore()
    return found[:0] if logits is None else logits


def _filled(numbers: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(numbers, (0, ROWS - len(numbers)))
