"""Names that are not options: what a call's unknown keyword argument may have been meant as."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import transformers
from transformers.utils.generic import TransformersKwargs

from ..config import BatchConfig
from ..errors import UnsupportedOptionError
from ..wording import did_you_mean, shown
from .base_model import GenerativeModel
from .images.prompt_images import IMAGE_TENSORS, IMAGE_TOKEN_TYPES
from .option_table import ALIASES, TABLE
from .other_names import FROM_ELSEWHERE

_KNOBS = frozenset(field.name for field in dataclasses.fields(BatchConfig))


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
