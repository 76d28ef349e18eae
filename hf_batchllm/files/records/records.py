"""One record of the input -> what is to be run for it, or why it cannot be. No model and no torch."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...inputs.chats import chat_problem, is_chat
from ...wording import a_kind, shown
from .openai_requests import OpenAIRequest, prompt_of, read_request
from .parsing import BadRecord, NoPrompt, NotJson, parse
from .settings import NOTHING_SAID, LineSettings, SettingError, settings_of
from .templates import MissingField, Template, its_fields

PLAIN, OPENAI = "plain", "openai"
ALL_FIELDS = ("all",)
_PROMPT_FIELDS = ("prompt", "messages")
_LIKELY = ("text", "question", "instruction", "input", "query", "content", "document", "sentence")


@dataclass(frozen=True)
class Form:
    """How plain records become prompts, and what of them goes into the results.

    prompt_field: the field that is the prompt; by default ``prompt`` or ``messages``.
    template: builds the prompt from fields instead.
    chat: a prompt that is text becomes the user's message of a chat; ``system`` begins every chat that has no such
        message.
    line_settings: whether fields named as settings are settings; else all of them are the user's own data.
    keep: fields that are copied into the results; ALL_FIELDS for all of them.
    """

    prompt_field: str | None = None
    template: Template | None = None
    chat: bool = False
    system: str | None = None
    line_settings: bool = True
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A record that can be run, as far as can be seen without a model."""

    number: int  # its place among the records, from 0
    prompt: Any  # as BatchGenerator.generate takes it
    settings: LineSettings  # of the line over those of the command line
    id: Any = None
    has_id: bool = False
    kept: Mapping[str, Any] = field(default_factory=dict)
    request: OpenAIRequest | None = None  # of an OpenAI batch


@dataclass(frozen=True, slots=True)
class BadPromptRecord:
    """A record that cannot be run, and why; ``where`` it is, for a person."""

    number: int
    where: str
    why: str
    id: Any = None
    has_id: bool = False
    kept: Mapping[str, Any] = field(default_factory=dict)
    param: str | None = None  # the setting that is to blame
    no_prompt: bool = False  # what should make its prompt is not there

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


class Reader:
    """``base``: what the command line says, all but its seed: an Item has that of its own line. ``cells``: records come
    from a table, and its cells may be text.

    ``dialect``: PLAIN or OPENAI, see ``dialect_of``. ``where`` names a record's place to a person ("line 17").
    ``second``: numbers of records whose custom_id was there before, see ``second_ids``. ``problems``: what is wrong
    with rows that could not be read as records.
    """

    def __init__(
        self,
        form: Form | None = None,
        base: LineSettings = NOTHING_SAID,
        *,
        dialect: str = PLAIN,
        cells: bool = False,
        where: Callable[[int], str] | None = None,
        second: Mapping[int, int] | None = None,
        problems: Mapping[int, str] | None = None,
    ) -> None:
        self.form = form or Form()
        self.base = replace(base, seed=None)
        self.dialect = dialect
        self.cells = cells
        self._where = where or (lambda number: f"record {number}")
        self._second = second or {}
        self._problems = problems or {}

    def read(self, number: int, raw: bytes) -> PromptRecord | BadPromptRecord:
        record: dict[str, Any] = {}
        name = "custom_id" if self.dialect == OPENAI else "id"
        try:
            record = parse(raw)
            if number in self._problems:
                raise BadRecord(self._problems[number])
            if self.dialect == OPENAI:
                return self._request(number, record)
            said = self._settings(record)
            return PromptRecord(
                number, self._prompt(record), said, record.get("id"), "id" in record, self._kept(record)
            )
        except BadRecord as bad:
            place = f"{self._where(number)}{bad.place if isinstance(bad, NotJson) else ''}"
            kept = self._kept(record) if self.dialect == PLAIN else {}
            none = isinstance(bad, NoPrompt)
            return BadPromptRecord(number, place, bad.why, record.get(name), name in record, kept, bad.param, none)

    def prompt_text(self, raw: bytes) -> str:
        """What two records must have in common at their beginning to share anything; "" for those that are bad."""
        try:
            record = parse(raw)
            if self.dialect == OPENAI:
                prompt = prompt_of(record)
            else:
                prompt = self._prompt(record)
        except BadRecord:
            return ""
        return prompt if isinstance(prompt, str) else json.dumps(prompt)

    def _request(self, number: int, record: dict[str, Any]) -> PromptRecord:
        if number in self._second:
            first = self._where(self._second[number])
            raise BadRecord(
                f"has the custom_id {shown(record.get('custom_id'))}, which {first} has already: each needs its own",
                "custom_id",
            )
        prompt, said, request = read_request(record)
        return PromptRecord(number, prompt, said.over(self.base), record["custom_id"], True, request=request)

    def _settings(self, record: dict[str, Any]) -> LineSettings:
        if not self.form.line_settings:
            return self.base
        template = self.form.template
        data = ("id", self.form.prompt_field) if template is None else ("id", *template.fields)
        try:
            said = settings_of(record, cells=self.cells, data=[name for name in data if name is not None])
        except SettingError as error:
            raise BadRecord(str(error), error.name) from None
        return self.base if said is NOTHING_SAID else said.over(self.base)

    def _kept(self, record: Mapping[str, Any]) -> dict[str, Any]:
        names = record if self.form.keep == ALL_FIELDS else self.form.keep
        return {name: record.get(name) for name in names if name != "id"}

    def _prompt(self, record: Mapping[str, Any]) -> Any:
        prompt = self._found(record)
        if not (self.form.chat or self.form.system is not None):
            return prompt
        if is_chat(prompt):
            roles = {message.get("role") for message in prompt if isinstance(message, Mapping)}
            if self.form.system is None or roles & {"system", "developer"}:
                return prompt
            return [{"role": "system", "content": self.form.system}, *prompt]
        if not isinstance(prompt, str):
            raise NoPrompt("has token ids as its prompt, of which no chat can be made: leave out --chat")
        begins = [] if self.form.system is None else [{"role": "system", "content": self.form.system}]
        return [*begins, {"role": "user", "content": prompt}]

    def _found(self, record: Mapping[str, Any]) -> Any:
        if self.form.template is not None:
            try:
                return self.form.template.fill(record, self.cells)
            except MissingField as missing:
                raise NoPrompt(str(missing)) from None
        names = _PROMPT_FIELDS if self.form.prompt_field is None else (self.form.prompt_field,)
        there = [name for name in names if record.get(name) not in ((None, "") if self.cells else (None,))]
        if len(there) > 1:
            raise BadRecord("has both `prompt` and `messages`: keep one, or say which with --prompt-field")
        if not there:
            raise NoPrompt(self._no_prompt(record))
        return self._checked(there[0], record[there[0]])

    def _no_prompt(self, record: Mapping[str, Any]) -> str:
        if self.form.prompt_field is not None:
            name = self.form.prompt_field
            return f"has {'nothing in' if name in record else 'no field'} {shown(name)}{its_fields(record)}"
        if any(name in record for name in _PROMPT_FIELDS):
            return "has an empty `prompt`" if "prompt" in record else "has empty `messages`"
        if "custom_id" in record and "body" in record:
            return "is a request of an OpenAI batch, and the first line of the file is none: put them into another file"
        like = next((name for name in _LIKELY if isinstance(record.get(name), str)), None)
        hint = f": pass --prompt-field {like}, or a --template" if like else ": pass --prompt-field, or a --template"
        return f"has no `prompt` and no `messages`{its_fields(record)}{hint}"

    def _checked(self, name: str, prompt: Any) -> Any:
        if self.cells and isinstance(prompt, str) and prompt.lstrip().startswith("[{"):
            try:
                prompt = json.loads(prompt)  # a chat in a cell
            except ValueError:
                if name == "messages":
                    raise BadRecord("has `messages` that are no JSON", name) from None
        if isinstance(prompt, str):
            if name == "messages":
                raise BadRecord("has a string as its `messages`: they are a list of {'role', 'content'}", name)
            return prompt
        if isinstance(prompt, list):
            if is_chat(prompt):
                why = chat_problem(prompt)
                if why is not None:
                    raise BadRecord(why, name)
            elif not prompt or name == "messages":
                raise BadRecord(f"has {'an empty' if not prompt else 'a strange'} list as its `{name}`", name)
            return prompt
        raise BadRecord(f"has {a_kind(prompt)} as its `{name}`: a prompt is a string, token ids or a chat", name)


def dialect_of(raw: bytes) -> str:
    """Of a file, by its first record."""
    try:
        record = parse(raw)
    except BadRecord:
        return PLAIN
    return OPENAI if "custom_id" in record and ("body" in record or "url" in record) else PLAIN


def second_ids(records: Iterable[tuple[int, bytes]]) -> dict[int, int]:
    """The records whose custom_id another one had before, each with the number of the first. 16 bytes a record."""
    numbers, hashes = array("q"), array("q")
    for number, raw in records:
        try:
            custom_id = parse(raw).get("custom_id")
        except BadRecord:
            continue
        if isinstance(custom_id, str):
            numbers.append(number)
            hashes.append(hash(custom_id))
    if not numbers:
        return {}
    order = np.lexsort((np.frombuffer(numbers, np.int64), np.frombuffer(hashes, np.int64)))
    ranked = np.frombuffer(hashes, np.int64)[order]
    placed = np.frombuffer(numbers, np.int64)[order]
    found: dict[int, int] = {}
    for at in np.flatnonzero(ranked[1:] == ranked[:-1]).tolist():
        before, number = int(placed[at]), int(placed[at + 1])
        found[number] = found.get(before, before)
    return found
