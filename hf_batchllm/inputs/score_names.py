"""The names of ``score``'s arguments: which ones a wrong name may stand for."""

from __future__ import annotations

from typing import Any

from ..errors import PromptsTypeError, UnsupportedOptionError
from .named_options import LEFT_OUT
from .other_names import FROM_ELSEWHERE
from .prompt_options import prompt_options_alone

_ARGUMENTS = ("contexts", "continuations", "choices", "adapter", "on_error", "progress")
_CALLED = {
    **dict.fromkeys(("prompts", "inputs", "questions"), "contexts"),
    **dict.fromkeys(("targets", "completions", "responses"), "continuations"),
    **dict.fromkeys(("answers", "options", "labels"), "choices"),
}
_INSTEAD = {
    **dict.fromkeys(
        ("logprobs", "prompt_logprobs", "top_logprobs", "echo"),
        "is not an option of score(): each result has `.logprobs`, one for each of its tokens, and `.logprob`, their "
        "sum. The likeliest other tokens come with generate(texts, max_new_tokens=1, prompt_logprobs=5)",
    ),
    **dict.fromkeys(
        ("normalize", "length_normalization", "length_penalty"),
        'is not an option of score(): see `.logprob` and `.mean_logprob` of a result, and scores.best(per="token")',
    ),
    **{name: FROM_ELSEWHERE[name] for name in ("batch_size", "use_tqdm", "lora_request")},
}


def checked_score_names(contexts: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The checked options for chats. ``options``: what the signature of ``score`` does not name."""
    for name in options:
        if name in _INSTEAD:
            raise UnsupportedOptionError(name, _INSTEAD[name])
    options = prompt_options_alone(options, "score", _ARGUMENTS, _CALLED, chats_alone=True)
    if contexts is LEFT_OUT:
        raise PromptsTypeError(
            "`contexts` is missing: pass the list of what comes before the continuations, or None to score whole texts"
        )
    return options
