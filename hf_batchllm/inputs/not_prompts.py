"""What people pass in place of prompts: what it is, and what to pass instead."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from ..wording import a_kind
from .chats import is_message

A_PROMPT_IS = "a prompt is a string, a list of token ids, a 1-D tensor or a chat"
PADDED_TENSOR = "a padded tensor goes to generate() by itself; here pass a list with the token ids of each prompt"
_COLUMNS = ("messages", "prompt_token_ids", "prompt", "text", "question", "instruction")  # usual names in data sets


def why_not_a_list(prompts: Any, a_prompt_is: str = A_PROMPT_IS) -> str | None:
    """What ``prompts`` is instead, with advice, if it cannot be read prompt by prompt."""
    if isinstance(prompts, Mapping):
        return describe_mapping(prompts, a_prompt_is)
    columns = getattr(prompts, "columns", None)
    if columns is None:
        columns = getattr(prompts, "column_names", None)
    if columns is not None and not isinstance(prompts, (list, tuple)):
        # Iterating over a table gives the names of its columns, or its rows as dicts.
        names = [name for name in columns if isinstance(name, str)] if isinstance(columns, Iterable) else []
        texts = (name for name in names if _holds_text(prompts, name))
        column = next((name for name in _COLUMNS if name in names), None) or next(texts, None)
        hint = f"one of its columns, such as prompts[{column!r}]" if column else "a column of it that holds texts"
        return f"{a_kind(prompts)}; pass {hint}"
    if isinstance(prompts, (itertools.count, itertools.cycle)):
        return f"{a_kind(prompts)}, which never ends; pass a list of prompts (itertools.islice cuts one off)"
    bad = (set, frozenset, bytes, bytearray, memoryview, type)
    if isinstance(prompts, bad) or not isinstance(prompts, Iterable):
        hint = " (decode them first)" if isinstance(prompts, (bytes, bytearray)) else ""
        hint = " (a set has no order)" if isinstance(prompts, (set, frozenset)) else hint
        return f"{a_kind(prompts)}{hint}; pass a list of prompts, where {a_prompt_is}"
    return None


def _holds_text(table: Any, column: str) -> bool:
    try:
        return isinstance(next(iter(table[column]), None), str)
    except Exception:  # of a table that gives no column by its name
        return False


def describe_mapping(given: Mapping[Any, Any], a_prompt_is: str = A_PROMPT_IS) -> str:
    """What a mapping in place of a prompt seems to be, and what to pass instead."""
    if "input_ids" in given:
        return f"{a_kind(given)}; pass the texts themselves, or the token ids in its 'input_ids'"
    if is_message(given):
        return f"{a_kind(given)}; a chat is a list of such messages: [{{'role': ..., 'content': ...}}]"
    column = next((name for name in _COLUMNS if name in given), None)
    if column is not None:
        return f"{a_kind(given)}; pass its value for {column!r}"
    return f"{a_kind(given)}; {a_prompt_is}, and several are a list"
