"""Checks of single options: by the table, and of arguments that are objects of transformers or functions."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ..config import BatchConfig
from ..errors import OptionValueError, UnsupportedModelError, UnsupportedOptionError
from ..wording import a_kind, shown
from .base_model import GenerativeModel, base_model
from .call_arguments import CallArguments
from .option_table import TABLE
from .option_values import wrong_value
from .processors_and_criteria import CRITERIA, PROCESSORS, check_list_or_factory
from .tokenizer import check_tokenizer


def check_generation_config(given: Any, name: str = "generation_config") -> None:
    """``name``: ``generation_config``, where None means no config, or the name of one in a list, such as ``...[3]``."""
    if isinstance(given, GenerationConfig) or (given is None and name == "generation_config"):
        return
    kind = type(given).__name__
    if isinstance(given, dict):
        hint = "pass its items as keyword arguments, generate(prompts, **options)"
    elif isinstance(given, BatchConfig):
        hint = "it goes into BatchGenerator(model, config=...)"
    elif isinstance(given, Integral):
        hint = f"if it is a length, pass `max_new_tokens={given}`"
    elif given is None:
        hint = "for the model's own defaults pass GenerationConfig()"
    elif kind == "SamplingParams":
        hint = "pass its values as keyword arguments, such as `do_sample=True, temperature=0.8`"
    elif isinstance(given, str):
        hint = "for the model's own defaults leave it out; if it is a prompt, put all prompts into one list"
    elif isinstance(given, list):
        hint = "if it is a prompt, put all prompts into one list"
    else:
        hint = "or pass its values as keyword arguments"
    raise UnsupportedOptionError(name, f"must be a transformers.GenerationConfig, not {a_kind(given)}: {hint}")


def check_values(options: Mapping[str, Any]) -> None:
    """The kind of each value, and the ranges that hold for every model."""
    for name, value in options.items():
        if value is not None and name in TABLE and (why := wrong_value(TABLE[name], value)) is not None:
            raise OptionValueError(name, why)


def check_call_arguments(given: CallArguments) -> None:
    check_values({"logprobs": given.logprobs, "prompt_logprobs": given.prompt_logprobs})
    check_list_or_factory(PROCESSORS, given.logits_processor)
    check_list_or_factory(CRITERIA, given.stopping_criteria)
    allowed = given.prefix_allowed_tokens_fn
    if allowed is not None and not callable(allowed):
        why = "must be a function of the prompt's index and its tokens so far that returns the token ids allowed next"
        raise OptionValueError("prefix_allowed_tokens_fn", f"{why}, not {a_kind(allowed)}")
    _check_negative_prompt(given.negative_prompt_ids, given.negative_prompt_attention_mask)
    if given.streamer is not None:
        lacking = [name for name in ("put", "end") if not callable(getattr(given.streamer, name, None))]
        if lacking or isinstance(given.streamer, type):
            hint = "an object of it" if isinstance(given.streamer, type) else "a TextStreamer of transformers, say"
            why = f"must have put() and end(), and is {a_kind(given.streamer)}: pass {hint}"
            raise OptionValueError("streamer", why)
    check_tokenizer(given.tokenizer)
    assistant = given.assistant_model
    if assistant is not None and not (isinstance(assistant, nn.Module) and hasattr(assistant, "config")):
        hint = "load it first, by `from_pretrained`" if isinstance(assistant, str) else "a smaller one of transformers"
        raise OptionValueError("assistant_model", f"must be a model, not {a_kind(assistant)}: {hint}")


def check_assistant(assistant: Any, tokenizer: Any, model: GenerativeModel) -> None:
    """``tokenizer``: of the assistant, which `generate` translates by where it is another one."""
    if assistant is None or tokenizer is not None:
        return
    try:
        base_model(assistant)
    except UnsupportedModelError as error:
        why = f"must be a language model of transformers, not {a_kind(assistant)}"
        raise OptionValueError("assistant_model", why) from error
    theirs, ours = (base_model(each).config.get_text_config(decoder=True).vocab_size for each in (assistant, model))
    if theirs != ours:
        raise OptionValueError(
            "assistant_model", f"has {theirs:,} tokens and the model {ours:,}: pass a model with the same tokenizer"
        )


def _check_negative_prompt(ids: Any, mask: Any) -> None:
    if mask is not None and ids is None:
        raise OptionValueError(
            "negative_prompt_attention_mask", "masks `negative_prompt_ids`, which is missing: pass it, too"
        )
    for name, value in (("negative_prompt_ids", ids), ("negative_prompt_attention_mask", mask)):
        if value is not None and not (isinstance(value, torch.Tensor) and value.ndim == 2):
            shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise OptionValueError(name, f"must be a 2-D tensor, a row for each prompt, not {a_kind(value)}{shape}")
    if mask is not None and mask.shape != ids.shape:
        why = f"has shape {list(mask.shape)} and `negative_prompt_ids` {list(ids.shape)}: they must be the same"
        raise OptionValueError("negative_prompt_attention_mask", why)


def check_on_error(on_error: Any) -> None:
    if on_error not in ("raise", "record"):
        raise OptionValueError("on_error", f'must be "raise" or "record", not {shown(on_error)}')


def check_progress(progress: Any) -> None:
    if progress is not None and not isinstance(progress, bool):
        why = f"must be True, False, or None for long lists only, not {a_kind(progress)}"
        raise OptionValueError("progress", why)
