"""CSV and Parquet -> one JSON object for each row."""

from __future__ import annotations

import base64
import csv
import datetime
import decimal
import io
import json
import math
import sys
import uuid
from collections.abc import Iterator
from typing import IO, Any

from ...errors import FilesError, InputFileError

Row = tuple[bytes, str]  # a JSON object; the problem of the row, or ""

_NOT_TEXT = (b"PAR1", b"PK\x03\x04", b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff")
_ROWS_AT_ONCE = 1024  # of a Parquet file
INSTALL = "pip install 'hf-batchllm[files]'"


def import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise FilesError(f"Parquet files need pyarrow: {INSTALL}") from error
    return pyarrow


def csv_rows(stream: IO[bytes], path: str, delimiter: str) -> Iterator[Row]:
    """Cells are text, and null where they are empty. The first row names the columns."""
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # applies to the whole process, so it is restored below
    try:
        yield from _csv_rows(text, path, delimiter)
    finally:
        csv.field_size_limit(before)
        if not text.closed:
            text.detach()  # the caller closes the stream


def _csv_rows(text: io.TextIOWrapper, path: str, delimiter: str) -> Iterator[Row]:
    header = text.readline()
    while header and not header.strip():
        header = text.readline()
    if not header:
        return
    if header.encode("utf-8", "surrogateescape").startswith(_NOT_TEXT):
        raise InputFileError(f"{path} is not text (compressed, a spreadsheet, UTF-16?): CSV is plain UTF-8 text")
    if delimiter == "," and "," not in header and ";" in header:
        delimiter = ";"  # spreadsheets write it where the comma is the decimal point
    reader = csv.reader(_with_header(header, text), delimiter=delimiter, strict=True)
    try:
        columns = next(reader)
    except csv.Error as error:
        raise InputFileError(f"{path}: its first row, with the names of the columns, cannot be read: {error}") from None
    names = _column_names([name.strip() for name in columns], path)
    rows = 0
    while True:
        first_line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise InputFileError(
                    f"{path}: the row that begins on line {first_line:,} has a quote that is never closed"
                ) from None
            cells = []
            problem = f"is not CSV: {error}"
        else:
            if not cells:
                continue
            problem = ""
            if len(cells) != len(names):
                problem = f"has {len(cells)} cells, and there are {len(names)} columns"
        rows += 1
        record = {name: cell or None for name, cell in zip(names, cells, strict=False)}
        for name, cell in record.items():
            if cell and not _is_utf8(cell):
                problem = problem or f"is not valid UTF-8 (column {name!r})"
        # A byte that is not UTF-8 becomes JSON's escape of the surrogate that stands for it.
        yield json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace"), problem


def _is_utf8(cell: str) -> bool:
    try:
        cell.encode()
    except UnicodeEncodeError:
        return False
    return True


def _with_header(first: str, rest: io.TextIOWrapper) -> Iterator[str]:
    yield first
    yield from rest


def _column_names(columns: list[str], path: str) -> list[str]:
    names = [name or f"column {place}" for place, name in enumerate(columns, 1)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputFileError(f"{path}: more than one column is named {', '.join(map(repr, twice))}: rename them")
    return names


def parquet_rows(stream: IO[bytes], path: str) -> Iterator[Row]:
    pyarrow = import_pyarrow()
    try:
        file = pyarrow.parquet.ParquetFile(stream)
        names = _column_names(list(file.schema_arrow.names), path)
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
            columns = [_column(column, pyarrow) for column in batch.columns]
            for cells in zip(*columns, strict=True):
                record = dict(zip(names, map(_cell, cells), strict=True))
                yield json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace"), ""
    except pyarrow.ArrowException as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputFileError(f"{path} cannot be read as Parquet: {lines[0]}") from error


def _column(column: Any, pyarrow: Any) -> list[Any]:
    if pyarrow.types.is_timestamp(column.type) and column.type.unit == "ns":
        column = column.cast(pyarrow.timestamp("us", column.type.tz), safe=False)  # nanoseconds would need pandas
    cells: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return cells


def _cell(value: Any) -> Any:
    """A cell of bytes is text, as some writers store it. One that cannot be is told from text by its form."""
    found = plain(value)
    if isinstance(value, bytes) and found.encode() != value:
        return {"base64": found}
    return found


def plain(value: Any) -> Any:
    """The value as JSON has it. Null fields of a struct are left out: Parquet writes them for missing fields."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items() if each is not None}
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, uuid.UUID):
        return str(value)
    raise InputFileError(f"a cell of the type {type(value).__name__} has no form in JSON")
