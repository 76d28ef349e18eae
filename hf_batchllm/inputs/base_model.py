"""The transformers model inside whatever wraps it."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..wording import a_kind


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    wrapped = hasattr(model, "get_base_model") and not isinstance(model, type)
    inner = model.get_base_model() if wrapped else model
    if not isinstance(inner, PreTrainedModel) and hasattr(inner, "peft_config"):  # PEFT's of adapters of several kinds
        inner = getattr(getattr(inner, "base_model", None), "model", inner)
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(
            f"BatchGenerator(model, tokenizer) takes a transformers model with a language-model head, "
            f"not {a_kind(model)}{_hint(model)}"
        )
    return inner


def _hint(given: Any) -> str:
    """What somebody may have meant who passed in something else than a model."""
    if isinstance(given, str | os.PathLike):
        return f": load it first, AutoModelForCausalLM.from_pretrained({os.fspath(given)!r})"
    if isinstance(given, type):
        return ": load a model first, AutoModelForCausalLM.from_pretrained(...)"
    if hasattr(given, "_orig_mod"):
        return ": give it the model itself, not what torch.compile made of it"
    for name in ("model", "module", "pretrained_model"):  # pipelines and trainers; DDP; TRL's models with a value head
        if isinstance(getattr(given, name, None), PreTrainedModel):
            return f": pass the model in it, its `.{name}`"
    if hasattr(given, "decode") and callable(given):
        return ": the model comes first, the tokenizer second"
    return ""
