"""The transformers model inside a PEFT wrapper."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ..errors import UnsupportedModelError
from ..wording import a_kind

if TYPE_CHECKING:

    class GenerativeModel(PreTrainedModel, GenerationMixin):
        """For the type checker alone: transformers has no class for its models that can generate."""

else:
    GenerativeModel = PreTrainedModel


def base_model(model: nn.Module) -> GenerativeModel:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    is_wrapper = hasattr(model, "get_base_model") and not isinstance(model, type)
    inner: Any = model.get_base_model() if is_wrapper else model
    if not isinstance(inner, PreTrainedModel) and hasattr(inner, "peft_config"):  # PEFT's mixed adapters wrap twice
        inner = getattr(getattr(inner, "base_model", None), "model", inner)
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(
            f"BatchGenerator(model, tokenizer) takes a transformers model with a language-model head, "
            f"not {a_kind(model)}{_hint(model)}"
        )
    return cast(GenerativeModel, inner)


def _hint(given: Any) -> str:
    """What the user may have meant to pass."""
    if isinstance(given, str | os.PathLike):
        return f": load it first, AutoModelForCausalLM.from_pretrained({os.fspath(given)!r})"
    if isinstance(given, type):
        return ": load a model first, AutoModelForCausalLM.from_pretrained(...)"
    if hasattr(given, "_orig_mod"):
        return ": pass the model that torch.compile was called with"
    for name in ("model", "module", "pretrained_model"):  # pipelines and trainers; DDP; TRL's models with a value head
        if isinstance(getattr(given, name, None), PreTrainedModel):
            return f": pass the model in it, its `.{name}`"
    if hasattr(given, "decode") and callable(given):
        return ": the model comes first, the tokenizer second"
    return ""
