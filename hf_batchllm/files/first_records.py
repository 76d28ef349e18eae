"""The first records of a file: which dialect the file has, and options that would make every record bad."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import InputFileError
from ..inputs.images.image_sources import ImageSources
from .records.json_records import RecordError, parse
from .records.prompt_records import ALL_FIELDS, OPENAI, BadPromptRecord, PromptRecord, RecordLayout
from .records.record_reader import RecordReader, dialect_of, repeated_ids
from .records.settings import GenerationSettings
from .store.formats import TABLES
from .store.sources import Source

_LOOKED_AT = 20  # records read before a model is loaded
_FIELDS_SHOWN = 8


def make_reader(
    source: Source,
    layout: RecordLayout,
    base: GenerationSettings,
    dialect: str = "auto",
    images: ImageSources | None = None,
) -> RecordReader:
    """``dialect``: PLAIN, OPENAI, or "auto": as the first records look. ``images``: which ones chats may show."""
    if dialect == "auto":
        dialect = dialect_of(source.records(range(min(source.count, _LOOKED_AT))))
    return RecordReader(
        layout,
        base,
        dialect=dialect,
        cells=source.format in TABLES,
        where=source.where,
        repeated=repeated_ids(_numbered(source)) if dialect == OPENAI else {},
        problems=source.problems,
        images=images,
    )


def check_first_records(reader: RecordReader, source: Source, limit: int | None = None) -> list[PromptRecord]:
    """The first records that can be run. A wrong option makes all records bad: it is refused at once, and not reported
    for each line."""
    count = min(source.count, _LOOKED_AT, limit or _LOOKED_AT)
    raws = source.records(range(count))
    records = [reader.read(number, raw) for number, raw in enumerate(raws)]
    without_prompt = [each for each in records if isinstance(each, BadPromptRecord) and each.no_prompt]
    if without_prompt and len(without_prompt) == len(records):
        others = "all" if count == source.count else f"the first {count}"
        more = f" (and so with {others} of them)" if count > 1 else ""
        raise InputFileError(f"{without_prompt[0]}{more}")
    _check_kept_fields(reader, raws)
    return [each for each in records if isinstance(each, PromptRecord)]


def _check_kept_fields(reader: RecordReader, raws: list[bytes]) -> None:
    if reader.layout.keep == ALL_FIELDS or not raws:
        return
    seen: dict[str, None] = {}
    for raw in raws:
        try:
            seen |= dict.fromkeys(parse(raw))
        except RecordError:
            continue
    for name in reader.layout.keep:
        if seen and name not in seen:
            raise InputFileError(
                f"--keep {name}: the records have no such field; they have {', '.join(list(seen)[:_FIELDS_SHOWN])}"
            )


def _numbered(source: Source) -> Iterator[tuple[int, bytes]]:
    for numbers in source.chunks():
        yield from zip(numbers.tolist(), source.records(numbers), strict=True)
