"""The names of ``score``'s arguments: which ones a wrong name may stand for."""

from __future__ import annotations

from typing import Any

from ..errors import PromptsTypeError
from .named_options import LEFT_OUT
from .prompt_options import prompt_options_alone

_ARGUMENTS = ("contexts", "continuations", "choices", "adapter", "on_error", "progress")
_CALLED = {
    **dict.fromkeys(("prompts", "prompt", "inputs", "queries", "questions"), "contexts"),
    **dict.fromkeys(("targets", "target", "completions", "responses"), "continuations"),
    **dict.fromkeys(("answers", "options", "candidates", "labels"), "choices"),
}


def checked_score_names(contexts: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The checked options for chats. ``options``: what the signature of ``score`` does not name."""
    options = prompt_options_alone(options, "score", _ARGUMENTS, _CALLED, chats_alone=True)
    if contexts is LEFT_OUT:
        raise PromptsTypeError(
            "`contexts` is missing: pass the list of what comes before the continuations, or None to score whole texts"
        )
    return options
