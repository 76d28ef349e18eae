"""The evaluation harness on this engine: ``python -m hf_batchllm.lm_eval``. Importing this makes the model known there.

The import is light: the class itself, and torch with it, is loaded when the harness asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .registration import NAME, register

if TYPE_CHECKING:
    from .model import BatchLM


__all__ = ["NAME", "BatchLM", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The harness's own command line, with this model registered, and chosen where no other is named."""
    from .command import run

    return run(arguments)


def __getattr__(name: str) -> Any:
    if name != "BatchLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .model import BatchLM

    return BatchLM


register()
