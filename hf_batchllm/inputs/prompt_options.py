"""The options of prompts: what a chat's template is given, and what becomes of a prompt that is too long. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import OptionValueError, UnsupportedOptionError
from ..notices import Notices
from ..wording import a_kind, did_you_mean, first_line, shown
from .option_table import PROMPT_OPTIONS, TABLE
from .option_values import check_one_for_each, is_for_each, wrong_value

FOR_CHATS = PROMPT_OPTIONS[:3]
_A_TOOL_IS = "a tool is a dict (its JSON schema), or a function with type hints and a docstring"
_NOT_FOR_TEMPLATES = {
    **dict.fromkeys(("tools", "continue_final_message"), "is an option of its own: pass it beside this"),
    "add_generation_prompt": "follows from `continue_final_message`: pass that instead",
    **dict.fromkeys(("truncation", "max_length"), "is not for templates: pass `max_prompt_tokens`"),
    **dict.fromkeys(
        ("conversation", "tokenize", "return_dict", "return_tensors", "padding", "return_assistant_tokens_mask"),
        "is not for templates: leave it out",
    ),
}


@dataclass(frozen=True, eq=False)
class PromptOptions:
    """The options of one prompt, or of all prompts that share them."""

    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    continue_final_message: bool | None = None  # None: a chat that ends with an assistant's message is continued
    max_prompt_tokens: int | None = None
    truncation_side: str | None = None  # None: left

    @property
    def for_chats(self) -> list[str]:
        """The names of those that are set and mean something to chats alone."""
        return [name for name in FOR_CHATS if getattr(self, name) not in (None, [], {})]


def take_prompt_options(options: dict[str, Any], tensors: bool = False) -> dict[str, Any]:
    """Those among a call's options, removed from them and checked. ``tensors``: the prompts are a padded tensor."""
    given = {name: options.pop(name) for name in PROMPT_OPTIONS if options.get(name) is not None}
    for name in PROMPT_OPTIONS:
        options.pop(name, None)
    for name, value in given.items():
        if tensors:
            raise UnsupportedOptionError(name, TABLE[name].instead)
        if is_for_each(name, value):
            given[name] = [None if each is None else checked_prompt_option(name, each) for each in value]
        else:
            given[name] = checked_prompt_option(name, value)
    return given


def prompt_options_alone(
    options: dict[str, Any],
    call: str,
    arguments: Sequence[str] = (),
    called: Mapping[str, str] | None = None,
    chats_alone: bool = False,
) -> dict[str, Any]:
    """The checked options of a call that takes no others.

    call: its name. arguments: the names in its signature. called: other names of these.
    chats_alone: the options are only those for chats.
    """
    allowed = FOR_CHATS if chats_alone else PROMPT_OPTIONS
    for name in options:
        if name not in allowed:
            named = (*arguments, *allowed)
            if called is not None and name in called:
                raise UnsupportedOptionError(name, f"is called `{called[name]}` in {call}()")
            hint = did_you_mean(name, named, f", which takes {', '.join(named)}")
            raise UnsupportedOptionError(name, f"is not an option of {call}(){hint}")
    return take_prompt_options(options)


def options_of_each(given: Mapping[str, Any], count: int) -> list[PromptOptions]:
    """The options of each of ``count`` prompts. Prompts with equal options have the same object.

    ``given``: checked options. One that is a list for each prompt holds None where it is left out.
    """
    lists = {name: value for name, value in given.items() if is_for_each(name, value)}
    for name, value in lists.items():
        check_one_for_each(name, value, count)
    shared = {name: value for name, value in given.items() if name not in lists}
    if not lists:
        return [PromptOptions(**shared)] * count
    known: dict[str, PromptOptions] = {}
    found: list[PromptOptions] = []
    for values in zip(*lists.values(), strict=True):
        key = repr(values)  # of data as in JSON: functions have become schemas
        if key not in known:
            known[key] = PromptOptions(**shared, **dict(zip(lists, values, strict=True)))
        found.append(known[key])
    return found


def names_for_each(given: Mapping[str, Any]) -> list[str]:
    """The options that are lists with one for each prompt."""
    return [name for name, value in given.items() if is_for_each(name, value)]


# -- values ------------------------------------------------------------------------------------------------------------


def checked_prompt_option(name: str, value: Any) -> Any:
    """The value for one prompt; tools that are functions become their schemas."""
    if name == "tools":
        return _tools(name, value)
    if name == "chat_template_kwargs":
        return _template_kwargs(name, value)
    if (why := wrong_value(TABLE[name], value)) is not None:
        raise OptionValueError(name, why)
    return value.item() if hasattr(value, "item") else value  # NumPy's kinds, too


def _tools(name: str, value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list | tuple):
        hint = ": pass [tool]" if callable(value) or isinstance(value, Mapping) else ""
        raise OptionValueError(name, f"must be a list of tools, not {a_kind(value)}{hint}; {_A_TOOL_IS}")
    return [_schema(name, tool) for tool in value]


def _schema(name: str, tool: Any) -> Mapping[str, Any]:
    if isinstance(tool, Mapping):
        return tool
    if not callable(tool) or isinstance(tool, type):
        raise OptionValueError(name, f"holds {a_kind(tool)}; {_A_TOOL_IS}")
    from transformers.utils.chat_template_utils import get_json_schema  # takes long, and schemas need none of it

    try:
        schema: Mapping[str, Any] = get_json_schema(tool)
    except Exception as error:  # of several kinds, all about its docstring and its type hints
        called = getattr(tool, "__name__", type(tool).__name__)
        why = f"holds the function {called}, of which transformers makes no schema: {first_line(error)}"
        raise OptionValueError(name, why) from error
    return schema


def _template_kwargs(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        why = "must be a dict of what the chat template is given, such as {'enable_thinking': False}"
        raise OptionValueError(name, f"{why}, not {shown(value)}")
    for key in value:
        if key in _NOT_FOR_TEMPLATES:
            raise OptionValueError(name, f"has `{key}`, which {_NOT_FOR_TEMPLATES[key]}")
    return value


# -- one call, prompts with options of their own -----------------------------------------------------------------------


def as_lists(options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options of each prompt as those of one call: a list for each option that any of them has.

    An option that all share (the same object, not an equal one) was given for all, and is passed so.
    """
    return dict(_lists(options))


def _lists(options: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name in PROMPT_OPTIONS:
        values = [each.get(name) for each in options]
        if len(values) > 1 and all(value is values[0] for value in values):
            if values[0] is not None:
                yield name, values[0]
        elif any(value is not None for value in values):
            yield name, values


# -- prompts that are too long -----------------------------------------------------------------------------------------


def shortened(ids: np.ndarray, most: int, side: str | None, around: Sequence[int], ends: bool) -> np.ndarray:
    """``most`` of the tokens. Those that the tokenizer puts ``around`` a text stay, such as its BOS.

    ``ends``: whether those at the end stay, too.
    """
    first = 0
    while first < min(len(around), len(ids)) and ids[first] == around[first]:
        first += 1
    last = len(around) - first if ends and first < len(around) else 0
    if last and ids[-last:].tolist() != list(around[first:]):
        last = 0
    if first + last >= most:
        first = last = 0
    body, room = ids[first : len(ids) - last], most - first - last
    kept = body[:room] if side == "right" else body[len(body) - room :]
    return np.concatenate([ids[:first], kept, ids[len(ids) - last :]])


def warn_of_cuts(lengths: Mapping[int, int], count: int, notices: Notices) -> None:
    """``lengths``: of the prompts that were cut, before they were; ``count``: all prompts of the call."""
    if not lengths:
        return
    longest = max(lengths.values())
    if len(lengths) == 1:
        what = f"{notices.places([*lengths])} has {longest:,} tokens, more than `max_prompt_tokens`, and was cut"
    else:
        what = (
            f"{len(lengths):,} of {count:,} prompts have more tokens than `max_prompt_tokens` and were cut "
            f"({notices.places(sorted(lengths))}; the longest has {longest:,})"
        )
    notices.of_prompts("cut", what)
