"""The evaluation harness on this engine: ``lm_eval --model hf-batchllm``. Importing this makes the model known there.

Light: the class itself, and torch with it, is loaded when the harness asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import BatchLM

NAME = "hf-batchllm"
_HOME = f"{__name__}.model:BatchLM"

__all__ = ["NAME", "BatchLM", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The harness's own command line, where the model is known, and is the one that runs if none is named."""
    from .command import run

    return run(arguments)


def _register() -> None:
    try:
        import lm_eval.models  # noqa: F401 -- if it is not loaded first, its own models are never registered
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        if error.name not in ("lm_eval", "lm_eval.models"):
            raise
        why = "the evaluation harness is not installed, or too old: pip install 'hf-batchllm[lm-eval]'"
        raise ModuleNotFoundError(why, name="lm_eval") from None
    if NAME not in model_registry:
        model_registry.register(NAME, target=_HOME)


def __getattr__(name: str) -> Any:
    if name != "BatchLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .model import BatchLM

    return BatchLM


_register()
