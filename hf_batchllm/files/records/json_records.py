"""A line of the input -> its JSON object, or the reason why it has none."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from ...wording import a_kind


class RecordError(Exception):
    """A record cannot be run. ``param``: the field that is to blame."""

    def __init__(self, why: str, param: str | None = None) -> None:
        self.why = why
        self.param = param
        super().__init__(why)


class NoPromptError(RecordError):
    """A record lacks the fields that should make its prompt: an option may be wrong, rather than the record."""


class NotJsonError(RecordError):
    """``place``: follows the line's number, as in ", column 7"."""

    def __init__(self, why: str, place: str) -> None:
        self.place = place
        super().__init__(why)


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        # NaN becomes null: tables write it for missing values.
        record = json.loads(raw.decode(), parse_constant=lambda name: None)
    except UnicodeDecodeError as error:
        raise NotJsonError(f"is not UTF-8: byte {raw[error.start]:#04x}", f", byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise NotJsonError(f"is not JSON: {error.msg}", f", column {error.colno}") from None
    except RecursionError:
        raise RecordError("is JSON that is nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits
        raise RecordError(f"is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise RecordError(f'is {a_kind(record)}: a record is a JSON object, such as {{"prompt": "..."}}')
    return record


def not_finite(raw: bytes, inside: str | None = None) -> Iterator[tuple[str, float]]:
    """The fields of a line, or of its object ``inside``, that hold NaN or Infinity, which ``parse`` makes null."""
    if b"NaN" not in raw and b"Infinity" not in raw:
        return
    record = json.loads(raw)
    if inside is not None:
        record = record.get(inside)
    for name, value in record.items() if isinstance(record, dict) else ():
        found = _first_not_finite(value)
        if found is not None:
            yield name, found


def _first_not_finite(value: Any) -> float | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for found in map(_first_not_finite, inner) if found is not None), None)
