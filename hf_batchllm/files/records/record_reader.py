"""One record of the input -> a prompt with its settings, or the reason why it cannot be run. No model and no torch."""

from __future__ import annotations

import difflib
import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...inputs.chats import chat_problem, is_chat
from ...inputs.images.image_sources import ImageSources, RefusedImage, media_in
from ...wording import a_kind, shown
from .json_records import NoPromptError, NotJsonError, RecordError, not_finite, parse
from .openai_requests import in_openai_names, prompt_of, read_request
from .prompt_records import ALL_FIELDS, OPENAI, PLAIN, BadPromptRecord, PromptRecord, RecordLayout
from .setting_names import TOP_LEVEL_NAMES, if_data
from .settings import NO_SETTINGS, GenerationSettings, SettingError, settings_in_record
from .templates import MissingField, fields_in_words

_PROMPT_FIELDS = ("prompt", "messages")
_LIKELY_PROMPT_FIELDS = ("text", "question", "instruction", "input", "query", "content", "document", "sentence")


class RecordReader:
    """Makes a PromptRecord or a BadPromptRecord of the bytes of each record.

    ``base``: the settings of the whole run, without its seed: a PromptRecord has only the seed of its own line.
    ``cells``: records come from a table, and numbers may be text. ``dialect``: PLAIN or OPENAI, see ``dialect_of``.
    ``where`` names a record's place to a person ("line 17"). ``repeated``: records whose custom_id an earlier one has,
    see ``repeated_ids``. ``problems``: rows that could not be read as records, and why. ``images``: which ones
    chats may show; without, chats are text.
    """

    def __init__(
        self,
        layout: RecordLayout | None = None,
        base: GenerationSettings = NO_SETTINGS,
        *,
        dialect: str = PLAIN,
        cells: bool = False,
        where: Callable[[int], str] | None = None,
        repeated: Mapping[int, int] | None = None,
        problems: Mapping[int, str] | None = None,
        images: ImageSources | None = None,
    ) -> None:
        self.layout = layout or RecordLayout()
        self.base = replace(base, seed=None)
        self.dialect = dialect
        self.cells = cells
        self._where = where or (lambda number: f"record {number}")
        self._repeated = repeated or {}
        self._problems = problems or {}
        self.images = images

    def read(self, number: int, raw: bytes) -> PromptRecord | BadPromptRecord:
        record: dict[str, Any] = {}
        name = "custom_id" if self.dialect == OPENAI else "id"
        try:
            record = parse(raw)
            if number in self._problems:
                raise RecordError(self._problems[number])
            if self.dialect == OPENAI:
                return self._request(number, record, raw)
            # First: if no record has one, an option is wrong rather than the records.
            prompt = self._with_images(self._prompt(record))
            settings = self._settings(record, raw)
            return PromptRecord(number, prompt, settings, record.get("id"), "id" in record, self._kept(record))
        except RecordError as error:
            where = f"{self._where(number)}{error.place if isinstance(error, NotJsonError) else ''}"
            return BadPromptRecord(
                number,
                where,
                error.why,
                id=record.get(name),
                has_id=name in record,
                kept=self._kept(record) if self.dialect == PLAIN else {},
                param=error.param,
                no_prompt=isinstance(error, NoPromptError),
            )

    def why(self, raw: bytes, settings: GenerationSettings, why: str) -> str:
        """A problem that only the model finds with the settings of a record, by the names that the record has."""
        if self.dialect == OPENAI:
            return in_openai_names(why)
        written = settings.as_written(why)
        return if_data(written, parse(raw)) if self.layout.line_settings else written

    def prompt_text(self, raw: bytes) -> str:
        """The text whose beginning two records must have in common to share anything; "" for a bad record."""
        try:
            record = parse(raw)
            if self.dialect == OPENAI:
                prompt = prompt_of(record, self.images is not None)
            else:
                prompt = self._prompt(record)
        except RecordError:
            return ""
        return prompt if isinstance(prompt, str) else json.dumps(prompt)

    def _request(self, number: int, record: dict[str, Any], raw: bytes) -> PromptRecord:
        if number in self._repeated:
            first = self._where(self._repeated[number])
            raise RecordError(
                f"has the custom_id {shown(record.get('custom_id'))}, which {first} has already: each needs its own",
                "custom_id",
            )
        prompt, settings, request = read_request(record, self.images is not None)
        _refuse_media(settings)
        for name, value in not_finite(raw, "body"):
            if name not in ("messages", "metadata"):
                raise RecordError(_no_number(name, value), name)
        prompt = self._with_images(prompt)
        return PromptRecord(number, prompt, settings.over(self.base), record["custom_id"], True, request=request)

    def _settings(self, record: dict[str, Any], raw: bytes) -> GenerationSettings:
        if not self.layout.line_settings:
            return self.base
        template = self.layout.template
        data = ("id", self.layout.prompt_field) if template is None else ("id", *template.fields)
        if not self.cells:  # tables have NaN for missing values
            own_names = TOP_LEVEL_NAMES.difference(name for name in data if name is not None)
            given = [pair for pair in not_finite(raw) if pair[0] in own_names]
            if "settings" not in data:
                given += not_finite(raw, "settings")
            for name, value in given:
                raise RecordError(_no_number(name, value), name)
        try:
            own = settings_in_record(
                record,
                cells=self.cells,
                data=[name for name in data if name is not None],
                kept=() if self.layout.keep == ALL_FIELDS else self.layout.keep,
            )
        except SettingError as error:
            raise RecordError(if_data(str(error), record), error.name) from None
        _refuse_media(own)
        return self.base if own is NO_SETTINGS else own.over(self.base)

    def _kept(self, record: Mapping[str, Any]) -> dict[str, Any]:
        names = record if self.layout.keep == ALL_FIELDS else self.layout.keep
        return {name: record.get(name) for name in names if name != "id"}

    def _with_images(self, prompt: Any) -> Any:
        """The prompt as ``generate`` takes it. Until then a chat names its images as the line does."""
        if self.images is None or not is_chat(prompt):
            return prompt
        try:
            return self.images.allowed(prompt)
        except RefusedImage as refused:
            why = f"`messages` {refused.why}" if self.dialect == OPENAI else refused.why
            raise (NoPromptError if refused.option else RecordError)(why, "messages") from None

    def _prompt(self, record: Mapping[str, Any]) -> Any:
        prompt = self._bare_prompt(record)
        if not (self.layout.chat or self.layout.system is not None):
            return prompt
        if is_chat(prompt):
            roles = {message.get("role") for message in prompt if isinstance(message, Mapping)}
            if self.layout.system is None or roles & {"system", "developer"}:
                return prompt
            return [{"role": "system", "content": self.layout.system}, *prompt]
        if not isinstance(prompt, str):
            raise NoPromptError("has token ids as its prompt, which cannot become a chat: leave out --chat")
        begins = [] if self.layout.system is None else [{"role": "system", "content": self.layout.system}]
        return [*begins, {"role": "user", "content": prompt}]

    def _bare_prompt(self, record: Mapping[str, Any]) -> Any:
        """Before ``chat`` and ``system`` make a chat of it."""
        if self.layout.template is not None:
            try:
                return self.layout.template.fill(record, self.cells)
            except MissingField as missing:
                raise NoPromptError(str(missing)) from None
        names = _PROMPT_FIELDS if self.layout.prompt_field is None else (self.layout.prompt_field,)
        present = [name for name in names if record.get(name) not in ((None, "") if self.cells else (None,))]
        if len(present) > 1:
            raise RecordError("has both `prompt` and `messages`: keep one, or say which with --prompt-field")
        if not present:
            raise NoPromptError(self._why_no_prompt(record))
        return self._checked(present[0], record[present[0]])

    def _why_no_prompt(self, record: Mapping[str, Any]) -> str:
        if self.layout.prompt_field is not None:
            name = self.layout.prompt_field
            what = f"has {'nothing in' if name in record else 'no field'} {shown(name)}{fields_in_words(record)}"
            misspelt = None if name in record else _near_field(record, (name,))
            return what if misspelt is None else f"{what}: did you mean --prompt-field {misspelt[0]}?"
        if any(name in record for name in _PROMPT_FIELDS):
            return "has an empty `prompt`" if "prompt" in record else "has empty `messages`"
        if "custom_id" in record and "body" in record:
            return (
                "is a request of an OpenAI batch, but the first line of the file is not: keep the two in separate files"
            )
        what = f"has no `prompt` and no `messages`{fields_in_words(record)}"
        misspelt = _near_field(record, _PROMPT_FIELDS)
        if misspelt is not None:
            return f"{what}: did you mean `{misspelt[1]}` by `{misspelt[0]}`?"
        like = next((name for name in _LIKELY_PROMPT_FIELDS if isinstance(record.get(name), str)), None)
        if isinstance(record.get("prompt_token_ids"), list):
            return f"{what}: pass --prompt-field prompt_token_ids, or call it `prompt`, which may hold token ids"
        hint = f": pass --prompt-field {like}, or a --template" if like else ": pass --prompt-field, or a --template"
        return what + hint

    def _checked(self, name: str, prompt: Any) -> Any:
        if self.cells and isinstance(prompt, str) and prompt.lstrip().startswith("[{"):
            try:
                prompt = json.loads(prompt)  # a chat in a cell
            except ValueError:
                if name == "messages":
                    raise RecordError("has `messages` that are no JSON", name) from None
        if isinstance(prompt, str):
            if name == "messages":
                raise RecordError("has a string as its `messages`: they are a list of {'role', 'content'}", name)
            return prompt
        if isinstance(prompt, list):
            if is_chat(prompt):
                why = chat_problem(prompt, images=self.images is not None)
                if why is not None:
                    raise RecordError(why, name)
            elif not prompt or name == "messages":
                what = f"a list as its `{name}` that is no chat" if prompt else f"an empty list as its `{name}`"
                raise RecordError(f"has {what}", name)
            return prompt
        raise RecordError(f"has {a_kind(prompt)} as its `{name}`: a prompt is a string, token ids or a chat", name)


def _near_field(record: Mapping[str, Any], wanted: Sequence[str]) -> tuple[str, str] | None:
    """A field whose name seems to be a misspelt one of ``wanted``, and that one."""
    for name, value in record.items():
        near = difflib.get_close_matches(name.lower(), wanted, n=1, cutoff=0.82)
        if near and name not in wanted and value not in (None, ""):
            return name, near[0]
    return None


def _no_number(name: str, value: float) -> str:
    written = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return f"`{name}` must be a number, not {written}: leave it out, or write null"


def _refuse_media(own: GenerationSettings) -> None:
    """Images are parts of messages, where it is looked at which ones may be read."""
    name = media_in(own.prompt_options.get("chat_template_kwargs"))
    if name is not None:
        why = f"`chat_template_kwargs` has {shown(name)}: an image is a part of a message, and only images are read"
        raise RecordError(why, "chat_template_kwargs")


def dialect_of(raws: Iterable[bytes]) -> str:
    """PLAIN or OPENAI, by the first record of a file that looks like either. A bad record says nothing."""
    for raw in raws:
        try:
            record = parse(raw)
        except RecordError:
            continue
        if "body" in record and ("custom_id" in record or "url" in record):
            return OPENAI
        if "custom_id" in record and "url" in record:
            return OPENAI
        if any(name in record for name in _PROMPT_FIELDS):
            return PLAIN
    return PLAIN


def repeated_ids(records: Iterable[tuple[int, bytes]]) -> dict[int, int]:
    """Records whose custom_id an earlier record has -> the number of that earlier record. Takes 16 bytes a record."""
    numbers, hashes = array("q"), array("q")
    for number, raw in records:
        try:
            custom_id = parse(raw).get("custom_id")
        except RecordError:
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
