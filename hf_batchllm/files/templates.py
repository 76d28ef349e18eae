"""``{context}\\n\\nQ: {question}\\nA:``: a prompt made of the fields of a record."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from typing import Any

from ..errors import BatchLLMError
from ..wording import shown

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
_MOST_FIELDS_SHOWN = 8


class TemplateError(BatchLLMError, ValueError):
    """A template that cannot be read."""


class MissingField(BatchLLMError, ValueError):
    """A record lacks a field that its prompt is made of."""


class Template:
    """``fields``: each once, in the template's order."""

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
                hint = "a field's name alone is allowed" if name.strip() else "write a brace itself twice, {{ and }}"
                raise TemplateError(f"the template has {what}: {hint}")
            self._parts.append((before, None if name is None else name.strip()))
        self.fields = list(dict.fromkeys(name for _, name in self._parts if name is not None))
        if not self.fields:
            raise TemplateError(
                "the template names no field, so all prompts would be the same: write a field's name in braces, "
                "as in 'Q: {question}'"
            )

    def fill(self, record: Mapping[str, Any], cells: bool = False) -> str:
        """``cells``: the record is a row of a table. An empty cell is an empty text, unless all cells are."""
        if cells and any(record.get(name) not in (None, "") for name in self.fields):
            record = {name: "" if value is None else value for name, value in record.items()}
        return "".join(before + ("" if name is None else _text(record, name)) for before, name in self._parts)

    def __repr__(self) -> str:
        return f"Template({self.text!r})"


def _text(record: Mapping[str, Any], name: str) -> str:
    found: Any = record
    for part in [name] if name in record else name.split("."):  # {meta.title}
        if not isinstance(found, Mapping) or part not in found:
            raise MissingField(f"has no field {shown(name)}, which the template names{fields_in_words(record)}")
        found = found[part]
    if found is None:
        raise MissingField(f"has nothing in {shown(name)}, which the template names")
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def fields_in_words(record: Mapping[str, Any]) -> str:
    names = list(map(str, record))
    more = ", ..." if len(names) > _MOST_FIELDS_SHOWN else ""
    return f" (it has {', '.join(names[:_MOST_FIELDS_SHOWN])}{more})" if names else " (it is empty)"


def unescaped(text: str) -> str:
    r"""``\n`` and the like, as they are typed in a shell."""
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), text, flags=re.DOTALL)
