"""The transformers model inside a PEFT wrapper."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..errors import UnsupportedModelError
from ..wording import a_kind

if TYPE_CHECKING:

    class GenerativeModel(PreTrainedModel):
        """For the type checker alone: the private methods of transformers' ``generate`` that this library calls."""

        generation_config: GenerationConfig
        generate: Callable[..., Any]

        def _extract_generation_mode_kwargs(self, *arguments: Any) -> dict[str, Any]: ...
        def _prepare_generation_config(
            self, config: GenerationConfig | None, **fields: Any
        ) -> tuple[GenerationConfig, dict[str, Any]]: ...
        def _prepare_special_tokens(self, config: GenerationConfig, **more: Any) -> None: ...
        def _prepare_attention_mask_for_generation(
            self, ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
        ) -> torch.Tensor: ...
        def _get_logits_processor(self, **arguments: Any) -> LogitsProcessorList: ...
        def _get_stopping_criteria(
            self, config: GenerationConfig, criteria: StoppingCriteriaList, tokenizer: Any
        ) -> StoppingCriteriaList: ...

else:
    GenerativeModel = PreTrainedModel


def base_model(model: nn.Module) -> GenerativeModel:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    given: Any = without_compile(model)
    is_wrapper = hasattr(given, "get_base_model") and not isinstance(given, type)
    inner = without_compile(given.get_base_model()) if is_wrapper else given
    if not isinstance(inner, PreTrainedModel) and hasattr(inner, "peft_config"):  # PEFT's mixed adapters wrap twice
        inner = getattr(getattr(inner, "base_model", None), "model", inner)
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(
            f"BatchGenerator(model, tokenizer) takes a transformers model with a language-model head, "
            f"not {a_kind(model)}{_hint(model)}"
        )
    return cast(GenerativeModel, inner)


def without_compile(model: nn.Module) -> nn.Module:
    """What ``torch.compile(model)`` was called with: its wrapper would compile each step anew."""
    while type(model).__name__ == "OptimizedModule" and isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
        model = inner
    return model


def _hint(given: Any) -> str:
    """What the user may have meant to pass."""
    if isinstance(given, str | os.PathLike):
        return f": load it first, AutoModelForCausalLM.from_pretrained({os.fspath(given)!r})"
    if isinstance(given, type):
        return ": load a model first, AutoModelForCausalLM.from_pretrained(...)"
    if type(given).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine"):
        return ": its weights may be spread over several processes. Load the model whole, in a process of its own"
    for name in ("model", "module", "pretrained_model"):  # pipelines and trainers; DDP; TRL's models with a value head
        if isinstance(getattr(given, name, None), PreTrainedModel):
            return f": pass the model in it, its `.{name}`"
    if hasattr(given, "decode") and callable(given):
        return ": the model comes first, the tokenizer second"
    return ""
