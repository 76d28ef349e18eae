"""``schema``, ``regex``, ``grammar`` and ``choice``: the form of answers. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import OptionValueError, UnsupportedOptionError
from ..wording import a_kind, either, first_line, shown
from .option_table import GRAMMAR_OPTIONS
from .option_values import check_one_for_each, is_for_each

_ANY_OBJECT = '{"type": "object"}'
_ANY_WORDS = ("json_object", "json")  # strings for the same as True
_OR_EACH = "or a list with one for each prompt, which holds None where an answer is free"


@dataclass(frozen=True)
class Grammar:
    """The form of an answer. Equal ones are compiled once. ``option``: the one that it was given as."""

    option: str
    text: str  # as llguidance takes it: for a schema its JSON, for a choice the JSON of a list


@dataclass(frozen=True)
class GivenGrammars:
    """The grammars of a call, by the option. ``lists``: for each prompt the value as it was passed, or None."""

    for_all: Mapping[str, Grammar]
    lists: Mapping[str, Sequence[Any]]

    @property
    def option(self) -> str:
        """The name of one, for errors that are about all."""
        return next(iter((*self.for_all, *self.lists)))

    def of_each(self, count: int) -> tuple[list[Grammar | None], dict[int, str]]:
        """The grammar of each of ``count`` prompts, and what is wrong with some: a prompt's number, and why."""
        for name, value in self.lists.items():
            check_one_for_each(name, value, count)
        whole = next(iter(self.for_all.values()), None)
        if not self.lists:
            return [whole] * count, {}
        found: list[Grammar | None] = []
        wrong: dict[int, str] = {}
        known: dict[tuple[str, int], Grammar] = {}  # by the object: one is often there for many prompts
        for place, values in enumerate(zip(*self.lists.values(), strict=True)):
            mine = [(name, value) for name, value in zip(self.lists, values, strict=True) if asks(value)]
            named = [*self.for_all, *(name for name, _ in mine)]
            grammar = whole
            if len(named) > 1:
                wrong[place] = f"has {_quoted(named)}: an answer has one form, so pass one of them"
            elif mine:
                name, value = mine[0]
                try:
                    if (name, id(value)) not in known:
                        known[name, id(value)] = checked_grammar(name, value)
                    grammar = known[name, id(value)]
                except OptionValueError as error:
                    wrong[place] = in_a_list(error)
            found.append(grammar)
        return found, wrong


def in_a_list(error: UnsupportedOptionError) -> str:
    """An error about an option's value, to follow the number of the prompt that it was given for."""
    return f"has a {str(error).replace('` ', '` that ', 1)}"


def asks(value: Any) -> bool:
    return value is not None and value is not False


def take_grammars(options: dict[str, Any]) -> GivenGrammars | None:
    """The grammars among a call's options, removed from them and checked as far as no grammar has to be compiled."""
    given = {name: options.pop(name) for name in GRAMMAR_OPTIONS if name in options}
    given = {
        name: value.tolist() if hasattr(value, "tolist") else value for name, value in given.items() if asks(value)
    }
    lists = {name: value for name, value in given.items() if is_for_each(name, value, (list, tuple, Grammar))}
    for_all = {name: checked_grammar(name, value) for name, value in given.items() if name not in lists}
    if len(for_all) > 1:
        *_, last = for_all
        raise OptionValueError(last, f"does not go with {_quoted([*for_all][:-1])}: an answer has one form")
    lists = {name: value for name, value in lists.items() if any(map(asks, value))}
    return GivenGrammars(for_all, lists) if for_all or lists else None


def checked_grammar(name: str, value: Any) -> Grammar:
    """The grammar of one prompt, or of all. One that was checked before is given back."""
    return value if isinstance(value, Grammar) else Grammar(name, _CHECKS[name](name, value))


def as_list(grammars: Sequence[Grammar | None]) -> dict[str, Any]:
    """The checked grammars of a call's prompts as an option of it."""
    first = next((grammar for grammar in grammars if grammar is not None), None)
    return {} if first is None else {first.option: list(grammars)}


def _schema(name: str, value: Any) -> str:
    if value is True or value in _ANY_WORDS:
        return _ANY_OBJECT
    if isinstance(value, type) and callable(getattr(value, "model_json_schema", None)):
        try:
            value = getattr(value, "model_json_schema")()  # noqa: B009 -- mypy knows no such class
        except Exception as error:  # of several kinds, all about the types of its fields
            why = f"is {a_kind(value)}, of which pydantic makes no schema: {first_line(error)}"
            raise OptionValueError(name, why) from error
    elif isinstance(value, str):
        written = value
        try:
            value = json.loads(value)
        except ValueError as error:
            raise OptionValueError(name, f"is not JSON ({error}): {shown(written)}") from None
        if not isinstance(value, Mapping):
            raise OptionValueError(name, f"is JSON of {a_kind(value)}, and a schema is an object: {shown(written)}")
    if not isinstance(value, Mapping):
        why = "must be a JSON schema (a dict, a string or a class of pydantic's) or True for any JSON object"
        raise OptionValueError(name, f"{why}, {_OR_EACH}; not {shown(value)}")
    try:
        return json.dumps(value, allow_nan=False)  # in its own order, which is that of the answer's fields
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionValueError(name, f"holds what JSON cannot hold ({first_line(error)})") from None


def _text(name: str, value: Any) -> str:
    what = "a regular expression" if name == "regex" else "a grammar in Lark"
    if not isinstance(value, str):
        hint = ": pass its `pattern`" if hasattr(value, "pattern") else ""
        raise OptionValueError(name, f"must be {what} (a string), {_OR_EACH}; not {shown(value)}{hint}")
    if not value.strip():
        raise OptionValueError(name, f"is {shown(value)}: it must be {what}. Leave it out for a free answer")
    return _encodable(name, value)


def _choice(name: str, value: Any) -> str:
    if not isinstance(value, list | tuple):
        why = "must be a list of strings, or a list of such lists, one for each prompt"
        raise OptionValueError(name, f"{why}; not {shown(value)}")
    for each in value:
        if not isinstance(each, str):
            raise OptionValueError(name, f"holds {shown(each)}: each answer to choose from is a string")
    if not value:
        raise OptionValueError(name, "is empty, so there is nothing to choose from: leave it out for a free answer")
    return json.dumps([_encodable(name, each) for each in value])


def _encodable(name: str, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise OptionValueError(name, f"holds half a character, which no text can have: {shown(text)}") from None
    return text


def _quoted(names: Sequence[str]) -> str:
    return either([f"`{name}`" for name in names]).replace(" or ", " and ")


_CHECKS: dict[str, Callable[[str, Any], str]] = {"schema": _schema, "regex": _text, "grammar": _text, "choice": _choice}
