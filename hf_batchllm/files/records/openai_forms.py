"""The form of answers that OpenAI's requests ask for: ``response_format``, and what vLLM understands beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...wording import shown
from .json_records import RecordError

# The form of an answer, in names of vLLM -> ours.
FORMS = {"guided_json": "schema", "guided_regex": "regex", "guided_grammar": "grammar", "guided_choice": "choice"}
_IN_OUTPUTS = {"json": "schema", "json_object": "schema", "regex": "regex", "grammar": "grammar", "choice": "choice"}
FORM_FIELDS = ("response_format", "structured_outputs", *FORMS)


def form_asked(body: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The form that the answer is to have, as a setting, and the field that asks for it."""
    found: dict[str, tuple[str, Any]] = {}
    asked = body.get("response_format")
    if asked is not None and (schema := _schema(asked)) is not None:
        found["response_format"] = "schema", schema
    for name, ours in FORMS.items():
        if body.get(name) is not None:
            found[name] = ours, body[name]
    outputs = body.get("structured_outputs")
    if outputs is not None:
        name = "structured_outputs"
        if not isinstance(outputs, Mapping):
            raise RecordError(f"`{name}` must be an object, not {shown(outputs)}", name)
        given = {key: value for key, value in outputs.items() if value is not None and value is not False}
        if len(given) > 1 or not given.keys() <= _IN_OUTPUTS.keys():
            raise RecordError(f"`{name}` must have one of {', '.join(_IN_OUTPUTS)}, and has {', '.join(given)}", name)
        for key, value in given.items():
            found[name] = _IN_OUTPUTS[key], value
    if len(found) > 1:
        first, second = list(found)[:2]
        raise RecordError(f"`{second}` contradicts `{first}`: an answer has one form, so keep one of them", second)
    for name, (ours, value) in found.items():
        return {ours: value}, name
    return {}, None


def _schema(asked: Any) -> Any:
    """What ``response_format`` asks for, as a setting; None for plain text."""
    name = "response_format"
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return True
    if kind != "json_schema":
        what = shown(asked if kind is None else kind)
        raise RecordError(f"`{name}` is of type {what}: it is text, json_object or json_schema", name)
    named = asked.get("json_schema")
    if not isinstance(named, Mapping):
        raise RecordError(f"`{name}` has no `json_schema`, an object that holds the `schema`", name)
    if not isinstance(named.get("strict"), bool | None):
        raise RecordError(f"`{name}` has a `strict` that is {shown(named['strict'])}: it is true or false", name)
    if not isinstance(named.get("schema"), Mapping):
        raise RecordError(f"`{name}` has no `schema` in its `json_schema`, or none that is an object", name)
    return named["schema"]
