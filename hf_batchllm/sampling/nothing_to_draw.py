"""The error of a sequence whose next token cannot be picked."""

from __future__ import annotations


class NothingToDrawError(RuntimeError):
    """A sequence's scores are no distribution. ``why``: in place of the usual reasons."""

    def __init__(self, why: str | None = None) -> None:
        super().__init__(
            why
            or "there is nothing to draw from: the model gave logits that are not numbers (NaN or infinite), or "
            "processors left no token a chance"
        )
