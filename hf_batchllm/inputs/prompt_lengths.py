"""Whether a prompt and its new tokens fit into the model, in words that follow "prompt 3"."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .options import Options


class Limits(Protocol):
    """Those of a model's architecture; None where there is none."""

    @property
    def name(self) -> str: ...
    @property
    def max_positions(self) -> int | None: ...  # learned positions
    @property
    def rope_limit(self) -> int | None: ...  # beyond it the rotary embedding is scaled by the length
    @property
    def vocab_size(self) -> int: ...  # ids that the model can read
    @property
    def head_rows(self) -> int | None: ...  # ids that have logits; None where the head does not tell


def id_without_logits(ids: np.ndarray, limits: Limits) -> str | None:
    """Why a log-probability cannot be given to each of ``ids`` ([tokens]): a head may be narrower than the table."""
    rows = limits.head_rows
    if rows is None or rows >= limits.vocab_size or not (ids >= rows).any():
        return None
    token = int(ids[ids >= rows][0])
    return (
        f"has token id {token:,}, which has no log-probability: {limits.name} reads {limits.vocab_size:,} ids, and its "
        f"head gives logits of the first {rows:,}"
    )


def length_problem(
    tokens: int, new_tokens: int, options: Options, limits: Limits, default_limit: int | None
) -> str | None:
    """Why a prompt of so many ``tokens`` may not grow by ``new_tokens``.

    ``default_limit``: the positions that bound ``generate``'s default length.
    """
    if new_tokens <= 0 and options.has_default_length:
        return f"has {tokens:,} tokens, and {limits.name} has {default_limit:,} positions"
    if new_tokens <= 0:
        return (
            f"has {tokens:,} tokens already and `max_length` is {options.config.max_length:,}: "
            "increase `max_length` or, better, set `max_new_tokens`"
        )
    described = f"has {tokens:,} tokens and may grow by {new_tokens:,}"
    positions = tokens + new_tokens - 1  # the last token is never run
    return position_problem(described, positions, limits, "shorten it, or lower `max_new_tokens`")


def position_problem(described: str, positions: int, limits: Limits, remedy: str) -> str | None:
    """Why so many positions cannot be run. ``described``: the sequence in words; ``remedy``: what to do about it."""
    limit = limits.max_positions
    if limit is not None and positions > limit:
        return f"{described}, but {limits.name} has learned {limit:,} positions: {remedy}"
    limit = limits.rope_limit
    if limit is not None and positions > limit:
        return (
            f"{described}: beyond {limit:,} {limits.name} scales its rotary embedding by the length, which is not "
            "supported yet"
        )
    return None
