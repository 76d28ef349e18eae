"""``{context}\\n\\nQ: {question}\\nA:``: a prompt made of the fields of a record."""

from __future__ import annotations

import difflib
import json
import string
from collections.abc import Mapping
from typing import Any

from ...errors import BatchLLMError
from ...wording import shown

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


class TemplateError(BatchLLMError, ValueError):
    """A template that cannot be read."""


class MissingField(BatchLLMError, ValueError):
    """A record lacks a field that its prompt is made of."""


class Template:
    def __init__(self, text: str) -> None:
        self.text = text
        self._parts: list[tuple[str, str | None]] = []
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise TemplateError(
                f"the template cannot be read: {error}. Fields stand in {{braces}}; a brace itself is written twice"
            ) from None
        for before, name, layout, conversion in parts:
            if name is not None and (not name.strip() or layout or conversion):
                what = f"{{{name}{'!' + conversion if conversion else ''}{':' + layout if layout else ''}}}"
                hint = (
                    "write a brace itself twice, {{ and }}" if not name.strip() else "a field's name alone is allowed"
                )
                raise TemplateError(f"the template has {what}: {hint}")
            self._parts.append((before, None if name is None else name.strip()))
        if not self.fields:
            raise TemplateError(
                "the template names no field, so all prompts would be the same: write a field's name in braces, "
                "as in 'Q: {question}'"
            )

    @property
    def fields(self) -> list[str]:
        """Each once, in the template's order."""
        return list(dict.fromkeys(name for _, name in self._parts if name is not None))

    def fill(self, record: Mapping[str, Any], cells: bool = False) -> str:
        """``cells``: the record is a row of a table. An empty cell is an empty text, unless all cells are."""
        if cells and any(record.get(name) not in (None, "") for name in self.fields):
            record = {name: "" if value is None else value for name, value in record.items()}
        return "".join(before + ("" if name is None else _text(record, name)) for before, name in self._parts)

    def __repr__(self) -> str:
        return f"Template({self.text!r})"


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if value is None and name not in record:
        found: Any = record
        for part in name.split("."):  # {meta.title}
            if not isinstance(found, Mapping) or part not in found:
                near = difflib.get_close_matches(name, [str(field) for field in record], n=1)
                hint = f": did you mean {{{near[0]}}}?" if near else ""
                why = f"has no field {shown(name)}, which the template names{fields_in_words(record)}{hint}"
                raise MissingField(why)
            found = found[part]
        value = found
    if value is None:
        raise MissingField(f"has nothing in {shown(name)}, which the template names")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def fields_in_words(record: Mapping[str, Any]) -> str:
    names = [str(name) for name in record]
    if not names:
        return " (it is empty)"
    return f" (it has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''})"


def unescaped(text: str) -> str:
    r"""``\n`` and the like, as they are typed in a shell."""
    parts: list[str] = []
    letters = iter(text)
    for letter in letters:
        if letter != "\\":
            parts.append(letter)
            continue
        follows = next(letters, "")
        parts.append(_ESCAPES.get(follows, "\\" + follows))
    return "".join(parts)
