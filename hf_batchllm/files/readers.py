"""From a file to what reads its records."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import InputFileError
from .records.parsing import BadRecord, parse
from .records.records import (
    ALL_FIELDS,
    OPENAI,
    PLAIN,
    BadPromptRecord,
    Form,
    PromptRecord,
    Reader,
    dialect_of,
    second_ids,
)
from .records.settings import LineSettings
from .store.sources import Source

_FIRST = 20  # records that are looked at before a model is loaded


def reader_for(source: Source, form: Form, base: LineSettings, dialect: str = "auto") -> Reader:
    """``dialect``: PLAIN, OPENAI, or "auto" for what the first record looks like."""
    if dialect == "auto":
        dialect = dialect_of(source.records([0])[0]) if source.count else PLAIN
    return Reader(
        form,
        base,
        dialect=dialect,
        cells=source.format != "jsonl",
        where=source.where,
        second=second_ids(_all(source)) if dialect == OPENAI else {},
        problems=source.problems,
    )


def check_first(reader: Reader, source: Source, limit: int | None = None) -> list[PromptRecord]:
    """The first records that can be run. An option that is wrong makes all lines bad: that is said at once, and not
    once for each line."""
    count = min(source.count, _FIRST, limit or _FIRST)
    raws = source.records(range(count))
    read = [reader.read(number, raw) for number, raw in enumerate(raws)]
    bad = [each for each in read if isinstance(each, BadPromptRecord) and each.no_prompt]
    if bad and len(bad) == len(read):
        more = f" (and so with {'all' if count == source.count else f'the first {count}'} of them)" if count > 1 else ""
        raise InputFileError(f"{bad[0]}{more}")
    _check_kept(reader, raws)
    return [each for each in read if isinstance(each, PromptRecord)]


def _check_kept(reader: Reader, raws: list[bytes]) -> None:
    if reader.form.keep == ALL_FIELDS or not raws:
        return
    seen: dict[str, None] = {}
    for raw in raws:
        try:
            seen |= dict.fromkeys(parse(raw))
        except BadRecord:
            continue
    for name in reader.form.keep:
        if seen and name not in seen:
            raise InputFileError(
                f"--keep {name}: the records have no such field; they have {', '.join(list(seen)[:8])}"
            )


def _all(source: Source) -> Iterator[tuple[int, bytes]]:
    for numbers in source.chunks():
        yield from zip(numbers.tolist(), source.records(numbers), strict=True)
