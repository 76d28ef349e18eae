"""From a file to what reads its records."""

from __future__ import annotations

from collections.abc import Iterator

from .records import OPENAI, PLAIN, Form, Reader, dialect_of, second_ids
from .settings import Settings
from .sources import Source


def reader_for(source: Source, form: Form, base: Settings, dialect: str = "auto") -> Reader:
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


def _all(source: Source) -> Iterator[tuple[int, bytes]]:
    for numbers in source.chunks():
        yield from zip(numbers.tolist(), source.records(numbers), strict=True)
