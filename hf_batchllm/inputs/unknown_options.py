"""Names that are not options: what a call's unknown keyword argument may have been meant as."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import transformers
from transformers.utils.generic import TransformersKwargs

from ..config import BatchConfig
from ..errors import PromptsTypeError, UnsupportedOptionError
from ..wording import did_you_mean, shown
from .base_model import GenerativeModel
from .images.prompt_images import IMAGE_TENSORS, IMAGE_TOKEN_TYPES
from .named_options import LEFT_OUT
from .option_table import ALIASES, TABLE
from .other_names import FROM_ELSEWHERE
from .prompt_options import prompt_options_alone

_KNOBS = frozenset(field.name for field in dataclasses.fields(BatchConfig))
_OF_SCORE = ("contexts", "continuations", "choices", "adapter", "on_error", "progress")
_CALLED_IN_SCORE = {
    **dict.fromkeys(("prompts", "inputs", "questions"), "contexts"),
    **dict.fromkeys(("targets", "completions", "responses"), "continuations"),
    **dict.fromkeys(("answers", "options", "labels"), "choices"),
}
_NOT_IN_SCORE = {
    **dict.fromkeys(
        ("logprobs", "prompt_logprobs", "top_logprobs", "echo"),
        "is not an option of score(): each result has `.logprobs`, one for each of its tokens, and `.logprob`, their "
        "sum. The most likely other tokens come with generate(texts, max_new_tokens=1, prompt_logprobs=5)",
    ),
    **dict.fromkeys(
        ("normalize", "length_normalization", "length_penalty"),
        'is not an option of score(): see `.logprob` and `.mean_logprob` of a result, and scores.best(per="token")',
    ),
    **{name: FROM_ELSEWHERE[name] for name in ("batch_size", "use_tqdm", "lora_request")},
}


def unknown_option(name: str, model: GenerativeModel) -> UnsupportedOptionError:
    """The error for a keyword argument that the table does not have."""
    if name in inspect.signature(type(model).generate).parameters:
        return UnsupportedOptionError(name, _newer_than_this())
    if (why := instead_of(name)) is not None:
        return UnsupportedOptionError(name, why)
    if name in TABLE:  # where another door, such as the harness, takes transformers' names alone
        return UnsupportedOptionError(name, "is an option of BatchGenerator.generate, and cannot be passed here")
    if name in (*IMAGE_TENSORS, IMAGE_TOKEN_TYPES):
        return UnsupportedOptionError(
            name,
            "goes with `input_ids`, as tensors: pass all that the processor makes, generate(**inputs); or pass chats "
            "with images (docs/images.md)",
        )
    if name in inspect.signature(model.forward).parameters or name in TransformersKwargs.__annotations__:
        why = f"is an input of {type(model).__name__} that is not supported: prompts are text or token ids"
        if name.startswith(("pixel_values", "image_")):
            why += ", or chats with images (docs/images.md)"
        return UnsupportedOptionError(name, why)
    hint = did_you_mean(name, [*TABLE, *ALIASES], cutoff=0.7)
    return UnsupportedOptionError(name, f"is not an option of generate{hint}")


def instead_of(name: str) -> str | None:
    """What to do in place of a name of another library, or of a field of BatchConfig."""
    if name in _KNOBS:
        return f"is a field of BatchConfig: BatchGenerator(model, {name}=...)"
    return FROM_ELSEWHERE.get(name)


def unknown_field(name: str, value: Any) -> UnsupportedOptionError:
    """The error for a field of GenerationConfig that the table does not have."""
    return UnsupportedOptionError(name, f"{_newer_than_this()} (it is set to {shown(value)})")


def _newer_than_this() -> str:
    return (
        f"is an option of transformers {transformers.__version__} that this version of hf-batchllm does not know yet: "
        "leave it out, or call the model's own `generate`"
    )


def checked_score_names(contexts: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The checked options for chats. ``options``: what the signature of ``score`` does not name."""
    for name in options:
        if name in _NOT_IN_SCORE:
            raise UnsupportedOptionError(name, _NOT_IN_SCORE[name])
    options = prompt_options_alone(options, "score", _OF_SCORE, _CALLED_IN_SCORE, chats_alone=True)
    if contexts is LEFT_OUT:
        raise PromptsTypeError(
            "`contexts` is missing: pass the list of what comes before the continuations, or None to score whole texts"
        )
    return options
