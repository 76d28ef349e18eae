"""A record of the input -> a prompt with its settings, or the reason why it cannot be run. No model and no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import InputFileError
from ..inputs.chats import chat_problem, is_chat
from ..inputs.images.image_sources import ImageSources, RefusedImage, media_in
from ..wording import a_kind, shown
from .json_lines import NoPromptError, RecordError, parse, wrong
from .openai import OpenAIRequest, in_openai_names, prompt_of, read_request
from .settings import NO_SETTINGS, GenerationSettings, SettingError, if_data, settings_in_record
from .sources import Source
from .tables import TABLES, UTF8_HINT
from .templates import MissingField, Template, fields_in_words

PLAIN, OPENAI = "plain", "openai"  # dialects
ALL_FIELDS = ("all",)
_PROMPT_FIELDS = ("prompt", "messages")
_LOOKED_AT = 20  # records read before a model is loaded
_SURE = 2  # first records that are no JSON objects: the file is of another kind, rather than these records bad
_OTHER_KIND = (
    "`jq -c .` makes lines of objects over several lines, `jq -c '.[]'` makes them of an array. "
    f"{UTF8_HINT}. --format says that IN is of another kind"
)
_FIELDS_SHOWN = 8
_MOST_PROBLEMS_SHOWN = 8


@dataclass(frozen=True)
class RecordLayout:
    """How plain records become prompts, and which of their fields go into the results.

    prompt_field: the field that is the prompt; by default ``prompt`` or ``messages``.
    template: builds the prompt from fields instead.
    chat: a prompt that is text becomes the user's message of a chat; ``system`` begins every chat that has no system
        message.
    line_settings: whether fields named as settings are settings; else all fields are the user's own data.
    keep: fields that are copied into the results; ALL_FIELDS for all of them.
    """

    prompt_field: str | None = None
    template: Template | None = None
    chat: bool = False
    system: str | None = None
    line_settings: bool = True
    keep: tuple[str, ...] = ()

    @property
    def data(self) -> list[str]:
        """Fields that are no settings, whatever their names."""
        fields = [self.prompt_field] if self.template is None else self.template.fields
        return ["id", *(name for name in fields if name is not None)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """``where``: the place as a person names it."""

    number: int
    where: str
    id: Any = None
    has_id: bool = False
    kept: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord(_Record):
    """A record that can be run, as far as can be seen without a model."""

    prompt: Any
    settings: GenerationSettings
    request: OpenAIRequest | None = None  # of an OpenAI batch

    def bad(self, why: str) -> BadPromptRecord:
        """The same record, where only the model shows that it cannot be run."""
        return BadPromptRecord(
            number=self.number, where=self.where, id=self.id, has_id=self.has_id, kept=self.kept, why=why
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BadPromptRecord(_Record):
    """A record that cannot be run, and the reason."""

    why: str
    param: str | None = None  # the setting that is to blame
    no_prompt: bool = False  # the fields that should make its prompt are missing or empty

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


class RecordReader:
    """Makes a PromptRecord or a BadPromptRecord of the bytes of each record.

    base: the settings of the whole run, without its seed: a PromptRecord has only the seed of its own line. dialect:
    PLAIN or OPENAI, see ``dialect_of``. cells: records come from a table, and numbers may be text. where: names a
    record's place to a person ("line 17"). repeated: records whose custom_id an earlier one has, see ``repeated_ids``.
    images: which ones chats may show; without, chats are text.
    """

    def __init__(
        self,
        layout: RecordLayout | None = None,
        base: GenerationSettings = NO_SETTINGS,
        *,
        dialect: str = PLAIN,
        cells: bool = False,
        where: Callable[[int], str] = lambda number: f"record {number}",
        repeated: Mapping[int, int] | None = None,
        images: ImageSources | None = None,
    ) -> None:
        self.layout = layout or RecordLayout()
        self.base = replace(base, seed=None)
        self.dialect, self.cells, self.images = dialect, cells, images
        self._where = where
        self._repeated = repeated or {}

    def read(self, number: int, raw: bytes) -> PromptRecord | BadPromptRecord:
        record: dict[str, Any] = {}
        of_record: dict[str, Any] = {"number": number, "where": self._where(number), "kept": self._kept(record)}
        try:
            record = parse(raw)
            name = "custom_id" if self.dialect == OPENAI else "id"
            of_record |= {"id": record.get(name), "has_id": name in record, "kept": self._kept(record)}
            if self.dialect == OPENAI:
                return self._request(record, raw, of_record)
            # First: if no record has one, an option is wrong rather than the records.
            prompt = self._with_images(self._prompt(record))
            return PromptRecord(prompt=prompt, settings=self._settings(record, raw), **of_record)
        except RecordError as error:
            of_record["where"] += error.place
            no_prompt = isinstance(error, NoPromptError)
            return BadPromptRecord(why=error.why, param=error.param, no_prompt=no_prompt, **of_record)

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
            openai = self.dialect == OPENAI
            prompt = prompt_of(record, self.images is not None) if openai else self._prompt(record)
        except RecordError:
            return ""
        return prompt if isinstance(prompt, str) else json.dumps(prompt)

    def _request(self, record: dict[str, Any], raw: bytes, of_record: Mapping[str, Any]) -> PromptRecord:
        if (first := self._repeated.get(of_record["number"])) is not None:
            again = f"which {self._where(first)} has already: each needs its own"
            raise RecordError(f"has the custom_id {shown(record.get('custom_id'))}, {again}", "custom_id")
        prompt, settings, request = read_request(_with_constants(record, raw), self.images is not None)
        _refuse_media(settings)
        prompt, settings = self._with_images(prompt), settings.over(self.base)
        return PromptRecord(prompt=prompt, settings=settings, request=request, **of_record)

    def _settings(self, record: dict[str, Any], raw: bytes) -> GenerationSettings:
        if not self.layout.line_settings:
            return self.base
        if not self.cells:  # tables have NaN for missing values
            record = _with_constants(record, raw)
        kept = () if self.layout.keep == ALL_FIELDS else self.layout.keep
        try:
            own = settings_in_record(record, cells=self.cells, data=self.layout.data, kept=kept)
        except SettingError as error:
            raise RecordError(if_data(str(error), record), error.name) from None
        _refuse_media(own)
        return self.base if own is NO_SETTINGS else own.over(self.base)

    def _kept(self, record: Mapping[str, Any]) -> dict[str, Any]:
        if self.dialect == OPENAI:
            return {}
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
        prompt, system = self._bare_prompt(record), self.layout.system
        if not (self.layout.chat or system is not None):
            return prompt
        if not isinstance(prompt, str) and not is_chat(prompt):
            raise NoPromptError("has token ids as its prompt, which cannot become a chat: leave out --chat")
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        roles = {message.get("role") for message in chat if isinstance(message, Mapping)}
        has_one = system is None or roles & {"system", "developer"}
        return chat if has_one else [{"role": "system", "content": system}, *chat]

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
        name, has = self.layout.prompt_field, fields_in_words(record)
        if name is not None:
            return f"has {'nothing in' if name in record else 'no field'} {shown(name)}{has}"
        if any(name in record for name in _PROMPT_FIELDS):
            return "has an empty `prompt`" if "prompt" in record else "has empty `messages`"
        if "custom_id" in record and "body" in record:
            return "is a request of an OpenAI batch, but the first line of the file is not: keep the two in two files"
        return f"has no `prompt` and no `messages`{has}: name its field with --prompt-field, or pass a --template"

    def _checked(self, name: str, prompt: Any) -> Any:
        if self.cells and isinstance(prompt, str) and prompt.lstrip().startswith("[{"):
            try:
                prompt = json.loads(prompt)  # a chat in a cell
            except ValueError:
                if name == "messages":
                    raise RecordError("has `messages` that are no JSON", name) from None
        if is_chat(prompt):
            if why := chat_problem(prompt, images=self.images is not None):
                raise RecordError(why, name)
        elif name == "messages" or not isinstance(prompt, str | list) or prompt == []:
            what = "an empty list" if prompt == [] else a_kind(prompt)
            are = "they are a list of {'role', 'content'}"
            them = are if name == "messages" else "a prompt is a string, token ids or a chat"
            raise RecordError(f"has {what} as its `{name}`: {them}", name)
        return prompt


def _with_constants(record: Any, raw: bytes) -> Any:
    """The record with NaN and Infinity, which no setting may be."""
    return json.loads(raw) if b"NaN" in raw or b"Infinity" in raw else record


def _refuse_media(own: GenerationSettings) -> None:
    """Images are parts of messages, where it is looked at which ones may be read."""
    kwargs = "chat_template_kwargs"
    if (name := media_in(own.prompt_options.get(kwargs))) is not None:
        raise wrong(kwargs, f"has {shown(name)}: an image is a part of a message, and only images are read")


def listed(headline: str, problems: Sequence[str]) -> str:
    hidden = len(problems) - _MOST_PROBLEMS_SHOWN
    more = [f"... and {hidden:,} more"] if hidden > 0 else []
    return "\n  ".join([headline, *problems[:_MOST_PROBLEMS_SHOWN], *more])


# -- a file's first records --------------------------------------------------------------------------------------------


def make_reader(
    source: Source,
    layout: RecordLayout,
    base: GenerationSettings,
    images: ImageSources | None = None,
) -> RecordReader:
    """The first records say which dialect it is. ``images``: which ones chats may show."""
    dialect = dialect_of(source.records(range(min(source.count, _LOOKED_AT))))
    return RecordReader(
        layout,
        base,
        dialect=dialect,
        cells=source.format in TABLES,
        where=source.where,
        repeated=repeated_ids(source.read()) if dialect == OPENAI else {},
        images=images,
    )


def check_first_records(reader: RecordReader, source: Source, limit: int | None = None) -> list[PromptRecord]:
    """The first records that can be run. A wrong option makes all records bad: it is refused at once, and not reported
    for each line."""
    count = min(source.count, _LOOKED_AT, limit or _LOOKED_AT)
    raws = source.records(range(count))
    records = [reader.read(number, raw) for number, raw in enumerate(raws)]
    if records and next(_parsed(raws[:_SURE]), None) is None:
        raise InputFileError(f"{source.name} is no file of JSON lines ({records[0]}). {_OTHER_KIND}")
    bad = [each for each in records if isinstance(each, BadPromptRecord) and each.no_prompt]
    if bad and len(bad) == len(records):
        others = "all" if count == source.count else f"the first {count}"
        raise InputFileError(f"{bad[0]}{f' (and so with {others} of them)' if count > 1 else ''}")
    seen = dict.fromkeys(name for record in _parsed(raws) for name in record)
    for name in () if reader.layout.keep == ALL_FIELDS or not seen else reader.layout.keep:
        if name not in seen:
            they = ", ".join(list(seen)[:_FIELDS_SHOWN])
            raise InputFileError(f"--keep {name}: the records have no such field; they have {they}")
    return [each for each in records if isinstance(each, PromptRecord)]


def _parsed(raws: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for raw in raws:
        try:
            yield parse(raw)
        except RecordError:
            continue


def dialect_of(raws: Iterable[bytes]) -> str:
    """PLAIN or OPENAI, by the first record of a file that looks like either. A bad record says nothing."""
    for record in _parsed(raws):
        if len({"custom_id", "url", "body"} & record.keys()) > 1:
            return OPENAI
        if any(name in record for name in _PROMPT_FIELDS):
            return PLAIN
    return PLAIN


def repeated_ids(records: Iterable[tuple[int, bytes]]) -> dict[int, int]:
    """Records whose custom_id an earlier record has -> the number of the first such record."""
    first: dict[int, int] = {}  # hash of an id -> the record that has it first
    found: dict[int, int] = {}
    for number, raw in records:
        for record in _parsed([raw]):
            if isinstance(name := record.get("custom_id"), str) and first.setdefault(hash(name), number) != number:
                found[number] = first[hash(name)]
    return found
