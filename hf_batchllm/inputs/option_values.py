"""Whether a value is right for its option, whatever the model: its kind, and its range. No torch.

transformers finds most wrong values itself, some by an error from deep inside. Those are refused here, before it looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from ..errors import OptionValueError
from ..wording import is_array, is_bool, is_whole, shown
from .option_chapters import A_LIST
from .option_row import OptionRow, Takes
from .option_table import TABLE

ZERO_TEMPERATURE = "is 0, and sampling needs a temperature above 0: for greedy decoding set `do_sample=False`"


def wrong_value(row: OptionRow, value: Any, in_files: bool = False) -> str | None:
    """What is wrong with a value, in words that follow the option's name; None if nothing is.

    in_files: flags are true or false alone, and all ranges hold.
    """
    if (why := _wrong_kind(row, value)) is not None:
        return why
    if in_files and row.takes is Takes.FLAG and not isinstance(value, bool):
        return f"must be {row.takes.value}, not {shown(value)}"
    above_limit = row.limit is not None and value > row.limit
    return out_of_range(row, value) if in_files or row.strict or above_limit else None


def out_of_range(row: OptionRow, value: Any) -> str | None:
    """The same of the value's range alone."""
    if row.most is not None and row.least is not None:
        return None if row.least <= value <= row.most else f"is {value:g}: it is a probability, from 0 to 1"
    if row.least is not None and value < row.least:
        return f"must be at least {row.least}{row.remedy}, but is {value:,}"
    if row.limit is not None and value > row.limit:
        return f"must be at most {row.limit:,}{row.remedy}, but is {value:,}"
    return None


def is_for_each(name: str, value: Any, lists: tuple[type, ...] = (list, tuple)) -> bool:
    """Whether the value is a list with one for each prompt. ``lists``: what such a list may hold of a list option."""
    if not isinstance(value, list | tuple):
        return False
    if TABLE[name].each == A_LIST or any(isinstance(each, lists) for each in value):
        return True
    return bool(value) and all(each is None for each in value)


def check_one_for_each(name: str, values: Sequence[Any], prompts: int) -> None:
    if len(values) != prompts:
        why = f"is a list of {len(values):,} and there are {prompts:,} prompts: it must have one for each"
        raise OptionValueError(name, why)


def _wrong_kind(row: OptionRow, value: Any) -> str | None:
    if row.name in _OF_THEIR_OWN:
        right, what = _OF_THEIR_OWN[row.name]
        return None if right(value) else f"must be {what}, not {shown(value)}"
    if row.takes is Takes.ANYTHING or _RIGHT[row.takes](value):
        return None
    hint = ""
    if (
        row.takes is Takes.TEXTS
        and isinstance(value, str | list | tuple)
        and all(isinstance(each, str) for each in value)
    ):
        what = "an empty string ends nothing" if value or isinstance(value, str) else "it names no string"
        return f"is {shown(value)}, and {what}: leave it out"
    if row.takes in (Takes.TOKEN, Takes.TOKENS, Takes.IDS) and isinstance(value, str):
        hint = ": tokenizer.convert_tokens_to_ids gives it"
    elif row.name == "eos_token_id" and isinstance(value, list | tuple) and not value:
        hint = ": for no EOS at all pass None"
    return f"must be {row.takes.value}, not {shown(value)}{hint}"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not is_bool(value) and not math.isnan(value)


def _is_penalty(value: Any) -> bool:
    """transformers has the same rule, but its error speaks of ``penalty``. A 1 of any type asks for nothing."""
    return _is_number(value) and (value == 1 or (isinstance(value, float) and value > 0))


def _is_flag(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_") or (isinstance(value, Integral) and value in (0, 1))


def _are_ids(value: Any) -> bool:
    ids = value.tolist() if is_array(value) and value.ndim <= 1 else value
    return isinstance(ids, list | tuple) and all(map(is_whole, ids))


def _are_listed_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and _are_ids(value)


def _is_token(value: Any) -> bool:
    return is_whole(value.tolist() if is_array(value) and value.ndim == 0 else value)


def _are_texts(value: Any) -> bool:
    listed = [value] if isinstance(value, str) else value
    return isinstance(listed, list | tuple) and bool(listed) and all(isinstance(each, str) and each for each in listed)


def _is_decay(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(each, Real) for each in value)


_RIGHT: dict[Takes, Callable[[Any], bool]] = {
    Takes.WHOLE: is_whole,
    Takes.NUMBER: _is_number,
    Takes.PENALTY: _is_penalty,
    Takes.FLAG: _is_flag,
    Takes.TOKEN: _is_token,
    Takes.TOKENS: lambda value: _is_token(value) or (_are_ids(value) and len(value) > 0),
    Takes.IDS: _are_ids,
    Takes.TEXTS: _are_texts,
}
_LOGPROBS = (
    lambda value: isinstance(value, bool) or (is_whole(value) and value >= 0),
    "a whole number of at least 0: how many of the most likely tokens come besides the token itself",
)
_OF_THEIR_OWN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "bad_words_ids": (
        lambda value: isinstance(value, list | tuple) and all(map(_are_listed_ids, value)),
        "a list of lists of token ids, such as [[5], [7, 8]]: tokenizer(words, add_special_tokens=False).input_ids",
    ),
    "sequence_bias": (
        lambda value: not isinstance(value, Mapping) or all(map(_are_listed_ids, value)),
        "a map of tuples of token ids to numbers, such as {(5,): -1.0}",
    ),
    "exponential_decay_length_penalty": (
        _is_decay,
        "a pair (new tokens before it begins, factor by which it grows), such as (20, 1.1)",
    ),
    "continue_final_message": (is_bool, "True (continue a chat's last message) or False (begin a new one)"),
    "truncation_side": (
        lambda value: isinstance(value, str) and value in ("left", "right"),
        '"left" (the beginning of a long prompt is cut off) or "right" (its end)',
    ),
    "early_stopping": (lambda value: isinstance(value, bool) or value == "never", 'True, False or "never"'),
    "watermarking_config": (
        lambda value: any(each.__name__ in ("dict", "BaseWatermarkingConfig") for each in type(value).__mro__),
        "a WatermarkingConfig or a SynthIDTextWatermarkingConfig of transformers",
    ),
}
