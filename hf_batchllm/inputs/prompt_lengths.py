"""Whether a prompt and its new tokens fit into the model, in words that follow "prompt 3"."""

from __future__ import annotations

from typing import Protocol

from .options import Options


class PositionLimits(Protocol):
    """The limits of a model's architecture; None where there is none."""

    @property
    def name(self) -> str: ...
    @property
    def max_positions(self) -> int | None: ...  # learned positions
    @property
    def rope_limit(self) -> int | None: ...  # beyond it the rotary embedding is scaled by the length


def length_problem(
    tokens: int, new_tokens: int, options: Options, limits: PositionLimits, default_limit: int | None
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


def position_problem(described: str, positions: int, limits: PositionLimits, remedy: str) -> str | None:
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
