"""Passes through a model of the same number of rows each, so that a row's numbers do not depend on how many there are.

A CPU's matrix products add up in another order for another number of rows. Of two numbers it was tried that they give
the same bits (engine/invariance_trial.py): most rows of prompts go through in wide passes then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

from ...patches.attention_interface import AttentionContext
from ...patches.fixed_products import FixedThreads
from ..batch import ModelBatch
from .attention_backend import Forward

ROWS = 32  # of a pass
WIDE_ROWS = 128  # of a wide pass
_WORTHWHILE = 65  # rows, for a wide pass


class Pass(AttentionContext, Protocol):
    """The attention of the rows [begin, end) of a step."""

    begin: int
    end: int
    size: int  # rows of the pass, of which the last ones may be made up


def cuts(rows: int, wanted: np.ndarray, wide: bool) -> list[tuple[int, int, int]]:
    """The begin, end and size of each pass. ``wanted``: the rows of which there are logits, in ascending order."""
    made, begin = list[tuple[int, int, int]](), 0
    while begin < rows:
        size = ROWS
        if wide and rows - begin >= _WORTHWHILE:
            first, end = np.searchsorted(wanted, (begin, begin + WIDE_ROWS))
            if end - first <= ROWS:  # a head computes logits for so many rows at a time
                size = WIDE_ROWS
        made.append((begin, min(begin + size, rows), size))
        begin += size
    return made


def in_fixed_passes(forward: Forward, passes: Iterable[Pass], threads: FixedThreads, batch: ModelBatch) -> torch.Tensor:
    """The logits of a step, [samples + asked, vocabulary]."""
    tokens, logits = batch.tokens, None
    wanted = tokens.logits_rows
    none = wanted.new_zeros(1)
    found = wanted.new_zeros(0)
    threads.begin()
    try:
        for attention in passes:
            rows = slice(attention.begin, attention.end)
            mine = ((wanted >= attention.begin) & (wanted < attention.end)).nonzero()[:, 0]
            ids, positions = (_filled(each[rows], attention.size) for each in (tokens.input_ids, tokens.position_ids))
            if not len(mine):
                found = forward(ids, positions, attention, none)
                continue
            asked, place = (wanted[mine] - attention.begin).unique(return_inverse=True)
            found = forward(ids, positions, attention, _filled(asked, ROWS))
            if logits is None:
                logits = found.new_empty(len(wanted), found.shape[1])
            logits[mine] = found[place]
    finally:
        threads.restore()
    return found[:0] if logits is None else logits


def _filled(numbers: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(numbers, (0, size - len(numbers)))
