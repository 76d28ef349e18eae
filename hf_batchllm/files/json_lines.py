"""A line of the input -> its JSON object, or why it has none; a result -> a line of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ..wording import a_kind


class RecordError(Exception):
    """A record cannot be run. ``param``: the field that is to blame. ``place``: follows the line's number."""

    def __init__(self, why: str, param: str | None = None, place: str = "") -> None:
        self.why, self.param, self.place = why, param, place
        super().__init__(why)


class NoPromptError(RecordError):
    """A record lacks the fields that should make its prompt: an option may be wrong, rather than the record."""


def wrong(name: str, why: str) -> RecordError:
    return RecordError(f"`{name}` {why}", name)


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line. NaN and Infinity become null: tables write them for missing values."""
    try:
        record = json.loads(raw.decode(), parse_constant=lambda name: None)
    except UnicodeDecodeError as error:
        why = f"is not UTF-8: byte {raw[error.start]:#04x}"
        raise RecordError(why, place=f", byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise RecordError(f"is not JSON: {error.msg}", place=f", column {error.colno}") from None
    except RecursionError:
        raise RecordError("is JSON that is nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits
        raise RecordError(f"is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise RecordError(f'is {a_kind(record)}: a record is a JSON object, such as {{"prompt": "..."}}')
    return record


def as_line(line: Mapping[str, Any]) -> bytes:
    """A JSON object on one line, without the newline."""
    try:
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    except ValueError:  # infinity, from 1e999 in a kept field or a score: not in JSON
        text = json.dumps(_finite(line), ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a character (a lone surrogate) in a kept field
        return json.dumps(json.loads(text)).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
