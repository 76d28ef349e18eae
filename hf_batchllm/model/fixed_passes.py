"""Passes through a model of the same number of rows each, so that a row's numbers do not depend on how many there are.

A CPU's matrix products add up in another order for another number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from ..patches.attention_interface import AttentionContext
from ..patches.fixed_products import FixedThreads
from .attention_backend import Forward
from .batch import ModelBatch

ROWS = 32  # of each pass


class Pass(AttentionContext, Protocol):
    """The attention of the rows [begin, end) of a step."""

    begin: int
    end: int


def in_fixed_passes(forward: Forward, passes: Iterable[Pass], threads: FixedThreads, batch: ModelBatch) -> torch.Tensor:
    """The logits of a step, [samples + asked, vocabulary]."""
    tokens, logits = batch.tokens, None
    wanted = tokens.logits_rows
    every, none = torch.arange(ROWS, device=wanted.device), wanted.new_zeros(1)
    found = wanted.new_zeros(0)
    threads.begin()
    try:
        for attention in passes:
            rows = slice(attention.begin, attention.end)
            mine = ((wanted >= attention.begin) & (wanted < attention.end)).nonzero()[:, 0]
            given = _filled(tokens.input_ids[rows]), _filled(tokens.position_ids[rows])
            found = forward(*given, attention, every if len(mine) else none)
            if len(mine):
                if logits is None:
                    logits = found.new_empty(len(wanted), found.shape[1])
                logits[mine] = found[wanted[mine] - attention.begin]
    finally:
        threads.restore()
    return found[:0] if logits is None else logits


def _filled(numbers: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(numbers, (0, ROWS - len(numbers)))
