"""Whether a model computes logits of given ids: a head may be narrower than the table of tokens."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Head(Protocol):
    """Of a model's architecture."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...  # ids that the model can read
    @property
    def head_rows(self) -> int | None: ...  # ids that have logits; None where the head does not tell


def id_without_logits(ids: np.ndarray, head: Head) -> str | None:
    """Why a log-probability cannot be given to each of ``ids`` ([tokens]), in words that follow "prompt 3"."""
    rows = head.head_rows
    if rows is None or rows >= head.vocab_size or not (ids >= rows).any():
        return None
    token = int(ids[ids >= rows][0])
    return (
        f"has token id {token:,}, which has no log-probability: {head.name} reads {head.vocab_size:,} ids, and its "
        f"head gives logits of the first {rows:,}"
    )
