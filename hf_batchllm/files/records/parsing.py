"""A line of the input -> its JSON object, or why it has none."""

from __future__ import annotations

import json
from typing import Any

from ...wording import a_kind


class BadRecord(Exception):
    """Why a record cannot be run. ``param``: the field that is to blame."""

    def __init__(self, why: str, param: str | None = None) -> None:
        self.why = why
        self.param = param
        super().__init__(why)


class NoPrompt(BadRecord):
    """It is a record, and what should make its prompt is not in it: an option may be wrong, rather than the record."""


class NotJson(BadRecord):
    def __init__(self, why: str, place: str) -> None:
        self.place = place
        super().__init__(why)


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        record = json.loads(raw.decode(), parse_constant=lambda name: None)  # NaN, as tables write what is missing
    except UnicodeDecodeError as error:
        raise NotJson(f"is not UTF-8: byte {raw[error.start]:#04x}", f", byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise NotJson(f"is not JSON: {error.msg}", f", column {error.colno}") from None
    except RecursionError:
        raise BadRecord("is JSON that is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise BadRecord(f"is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadRecord(f'is {a_kind(record)}: a record is a JSON object, such as {{"prompt": "..."}}')
    return record
