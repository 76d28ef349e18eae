"""Checks of single values: their kinds, and the ranges that hold for every model.

transformers finds most wrong values itself, some by an error from deep inside. Those are refused here, before it looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import BaseWatermarkingConfig

from ..config import BatchConfig
from ..errors import OptionValueError, UnsupportedModelError, UnsupportedOptionError
from ..wording import a_kind, is_bool, is_whole, shown
from .base_model import GenerativeModel, base_model
from .call_arguments import CallArguments
from .option_ranges import LONGEST_NGRAMS, out_of_range
from .option_row import Takes
from .option_table import TABLE
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


_LEAST = {
    "num_return_sequences": 1,
    "num_beams": 1,
    "prompt_lookup_num_tokens": 0,
    "max_matching_ngram_size": 1,
    "num_assistant_tokens": 1,
}


def check_values(options: Mapping[str, Any]) -> None:
    """The kind of each value, and the ranges that hold for every model."""
    for name, value in options.items():
        row = TABLE.get(name) if value is not None else None
        if row is None:
            continue
        if row.takes is Takes.WHOLE and not is_whole(value):
            raise OptionValueError(name, f"must be a whole number, not {shown(value)}")
        if row.takes is Takes.FLAG and not _is_flag(value):
            raise OptionValueError(name, f"must be True or False, not {shown(value)}")
        if row.takes is Takes.NUMBER:
            _check_number(name, value)
        if row.takes in (Takes.TOKEN, Takes.TOKENS, Takes.IDS):
            _check_token_ids(name, value, row.takes)
        if name in _CHECKS:
            _CHECKS[name](name, value)
    for name in LONGEST_NGRAMS:
        value = options.get(name)
        if value is not None and value > 0 and (why := out_of_range(name, value)) is not None:
            raise OptionValueError(name, why)
    if options.get("max_new_tokens") is not None and options["max_new_tokens"] <= 0:
        raise OptionValueError("max_new_tokens", f"must be greater than 0, but is {options['max_new_tokens']}")
    for name, least in _LEAST.items():
        if options.get(name) is not None and options[name] < least:
            raise OptionValueError(name, f"must be at least {least}, but is {options[name]}")


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not is_bool(value)


def _is_flag(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_") or (isinstance(value, Integral) and value in (0, 1))


def _check_number(name: str, value: Any) -> None:
    if not _is_real(value) or math.isnan(value):
        raise OptionValueError(name, f"must be a number, not {shown(value)}")
    # transformers has the same rule, but its error speaks of `penalty`. A 1 of any type asks for nothing.
    if name.endswith("repetition_penalty") and value != 1 and not (isinstance(value, float) and value > 0):
        raise OptionValueError(name, f"must be a float above 0, such as 1.2, not {shown(value)}")


def _check_token_ids(name: str, value: Any, takes: Takes) -> None:
    if isinstance(value, torch.Tensor | np.ndarray):
        ids: Any = value.tolist() if value.ndim <= 1 else None
    else:
        ids = value
    listed = isinstance(ids, list | tuple)
    if takes is not Takes.TOKEN and listed and (ids or takes is Takes.IDS):
        good = all(map(is_whole, ids))
    else:
        good = takes is not Takes.IDS and is_whole(ids)
    if not good:
        hint = ": tokenizer.convert_tokens_to_ids gives it" if isinstance(value, str) else ""
        hint = ": for no EOS at all pass None" if name == "eos_token_id" and listed and not ids else hint
        raise OptionValueError(name, f"must be {takes.value}, not {shown(value)}{hint}")


def _check_stop_strings(name: str, value: Any) -> None:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) for each in listed):
        raise OptionValueError(name, f"must be a string, or a list of strings, not {shown(value)}")
    if not listed:
        raise OptionValueError(name, f"is {shown(value)}, which names no string: leave it out")
    if not all(listed):
        raise OptionValueError(name, f"is {shown(value)}, and an empty string ends nothing: leave it out")


def _check_decay(name: str, value: Any) -> None:
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(each, Real) for each in value)):
        why = "must be a pair (new tokens before it begins, factor by which it grows), such as (20, 1.1)"
        raise OptionValueError(name, f"{why}, not {shown(value)}")


def _check_early_stopping(name: str, value: Any) -> None:
    if not isinstance(value, bool) and value != "never":
        raise OptionValueError(name, f'must be True, False or "never", not {shown(value)}')


def _check_watermark(name: str, value: Any) -> None:
    if not isinstance(value, dict | BaseWatermarkingConfig):
        why = "must be a WatermarkingConfig or a SynthIDTextWatermarkingConfig of transformers"
        raise OptionValueError(name, f"{why}, not {shown(value)}")


def _check_bad_words(name: str, value: Any) -> None:
    if not isinstance(value, list | tuple) or not all(_are_tokens(each) for each in value):
        hint = ": tokenizer(words, add_special_tokens=False).input_ids makes it of words"
        raise OptionValueError(
            name, f"must be a list of lists of token ids, such as [[5], [7, 8]], not {shown(value)}{hint}"
        )


def _check_bias(name: str, value: Any) -> None:
    if isinstance(value, Mapping) and not all(_are_tokens(each) for each in value):
        raise OptionValueError(
            name, f"must map tuples of token ids to numbers, such as {{(5,): -1.0}}, not {shown(value)}"
        )


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(is_whole, value))


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "bad_words_ids": _check_bad_words,
    "sequence_bias": _check_bias,
    "stop_strings": _check_stop_strings,
    "exponential_decay_length_penalty": _check_decay,
    "watermarking_config": _check_watermark,
    "early_stopping": _check_early_stopping,
}


def check_call_arguments(given: CallArguments) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        _check_logprobs(name, getattr(given, name))
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


def _check_logprobs(name: str, value: Any) -> None:
    if value is not None and (not is_whole(value) or value < 0):
        # True is refused, too: some libraries take it for 1, others for 0.
        why = "must be a whole number of at least 0: how many of the likeliest tokens come besides the token itself"
        raise OptionValueError(name, f"{why}, not {shown(value)}")


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
