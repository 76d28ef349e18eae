"""The kinds of files; CSV, Parquet and plain text as records, and results as CSV and Parquet."""

from __future__ import annotations

import base64
import csv
import datetime
import decimal
import io
import itertools
import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

from ..errors import FilesError, InputFileError

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
TABLES = ("csv", "tsv", "parquet")
TEXT = "txt"  # a prompt on each line; an input only, as an answer may have several lines
INSTALL = "pip install 'hf-batchllm[files]'"
MARK = b"\xef\xbb\xbf"  # some editors write it before UTF-8
UTF8_HINT = "`iconv` makes UTF-8 of other text. A compressed file is unpacked first, as in `zcat IN | ... run - OUT`"
_ROWS_AT_ONCE = 2048
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_FIRST_COLUMNS, _LAST_COLUMNS = ("index", "id", "sample"), ("error",)
_NOT_IN_TABLES = ("key", "samples")
_MIXED = "values of several types"


def format_of(path: str, format: str | None, error: type[Exception]) -> str:
    """``format`` if it is given; else the suffix decides. ``error``: what to raise; InputFileError means an input."""
    reads = error is InputFileError
    if format is not None:
        formats = [*dict.fromkeys(FORMATS.values()), *([TEXT] if reads else [])]
        if format not in formats:
            raise error(f"format {format!r}: it must be one of {', '.join(formats)}")
        return format
    suffix = os.path.splitext(path)[1].lower()
    known = FORMATS | ({f".{TEXT}": TEXT} if reads else {})
    if path == "-" or suffix in known:
        return known.get(suffix, "jsonl")
    option = "--format" if reads else "--output-format"
    raise error(f"{path}: its name does not say what it is ({', '.join(known)}): pass the format (`{option} jsonl`)")


def import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise FilesError(f"Parquet files need pyarrow: {INSTALL}") from error
    return pyarrow


# -- inputs ------------------------------------------------------------------------------------------------------------


def rows_of(stream: IO[bytes], path: str, kind: str) -> Iterator[bytes]:
    """The records of a table or a text, as JSON; nothing for a blank line of a text."""
    if kind == "parquet":
        return _parquet_rows(stream, path)
    return _text_rows(stream, path) if kind == TEXT else _csv_rows(stream, path, _DELIMITERS[kind])


def _lines(stream: IO[bytes], path: str) -> Iterator[str]:
    for number, raw in enumerate(stream, 1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            why = f"is not UTF-8: byte {raw[error.start]:#04x} at byte {error.start + 1}"
            raise InputFileError(f"{path}, line {number:,}: {why}. {UTF8_HINT}") from None


def _text_rows(stream: IO[bytes], path: str) -> Iterator[bytes]:
    """A prompt on each line; spaces are part of it."""
    for line in _lines(stream, path):
        yield _as_json({"prompt": line.rstrip("\r\n")}) if line.strip() else b""


def _csv_rows(stream: IO[bytes], path: str, delimiter: str) -> Iterator[bytes]:
    """Cells are text, and null where they are empty. The first row names the columns."""
    lines = _lines(stream, path)
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # applies to the whole process, so it is restored below
    begin = 1
    try:
        header = next((line for line in lines if line.strip()), "")
        if delimiter == "," and "," not in header and ";" in header:
            delimiter = ";"  # spreadsheets write it where the comma is the decimal point
        reader = csv.reader(itertools.chain([header] if header else [], lines), delimiter=delimiter, strict=True)
        names = _column_names([name.strip() for name in next(reader, [])], path)
        begin = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(names):
                raise csv.Error(f"it has {len(cells)} cells, and there are {len(names)} columns")
            if cells:
                yield _as_json({name: cell or None for name, cell in zip(names, cells, strict=True)})
            begin = reader.line_num + 1
    except csv.Error as error:
        raise InputFileError(f"{path}: the row that begins on line {begin:,} is not CSV: {error}") from None
    finally:
        csv.field_size_limit(before)


def _as_json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode()


def _column_names(columns: list[str], path: str) -> list[str]:
    names = [name or f"column {place}" for place, name in enumerate(columns, 1)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputFileError(f"{path}: more than one column is named {', '.join(map(repr, twice))}: rename them")
    return names


def _parquet_rows(stream: IO[bytes], path: str) -> Iterator[bytes]:
    pyarrow = import_pyarrow()
    try:
        file = pyarrow.parquet.ParquetFile(stream)
        names = _column_names(list(file.schema_arrow.names), path)
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
            for cells in zip(*[_column(column, pyarrow) for column in batch.columns], strict=True):
                yield _as_json(dict(zip(names, map(_cell, cells), strict=True)))
    except pyarrow.ArrowException as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputFileError(f"{path} cannot be read as Parquet: {why}") from error


def _column(column: Any, pyarrow: Any) -> list[Any]:
    if pyarrow.types.is_timestamp(column.type) and column.type.unit == "ns":
        column = column.cast(pyarrow.timestamp("us", column.type.tz), safe=False)  # nanoseconds would need pandas
    cells: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return cells


def _cell(value: Any) -> Any:
    """A cell of bytes is text, as some writers store it. One that cannot be is told from text by its form."""
    found = plain(value)
    return {"base64": found} if isinstance(value, bytes) and found.encode() != value else found


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


# -- outputs -----------------------------------------------------------------------------------------------------------


def write_table(file: IO[bytes], kind: str, results: Callable[[], Iterable[bytes]]) -> None:
    """``results``: gives the lines in their order; it is called once for each pass over them."""
    (_write_parquet if kind == "parquet" else _write_csv)(file, kind, results)


def table_rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each sample: the fields that all samples share, and the sample's own."""
    shared = {name: value for name, value in result.items() if name not in _NOT_IN_TABLES}
    samples = result.get("samples")
    if not isinstance(samples, list) or not samples:
        yield shared
        return
    for number, sample in enumerate(samples):
        yield {**shared, "sample": number, **(sample if isinstance(sample, dict) else {"text": sample})}


def _rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        yield from table_rows(json.loads(line))


def _ordered(names: Iterable[str]) -> list[str]:
    known = dict.fromkeys(names)
    between = [name for name in known if name not in (*_FIRST_COLUMNS, *_LAST_COLUMNS)]
    return [*(name for name in _FIRST_COLUMNS if name in known), *between, *_LAST_COLUMNS]


def _write_csv(file: IO[bytes], kind: str, results: Callable[[], Iterable[bytes]]) -> None:
    """Lists and objects are JSON in their cell; a missing value is an empty cell."""
    names = _ordered(name for row in _rows(results()) for name in row)
    # Each row through a text of its own: "\r\n" makes the writer quote cells with either character.
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=_DELIMITERS[kind], lineterminator="\r\n")
    for row in itertools.chain([dict(zip(names, names, strict=True))], _rows(results())):
        writer.writerow([_as_text(row.get(name)) for name in names])
        file.write(text.getvalue().removesuffix("\r\n").encode("utf-8", "backslashreplace") + b"\n")
        text.seek(0)
        text.truncate()


def _as_text(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write_parquet(file: IO[bytes], kind: str, results: Callable[[], Iterable[bytes]]) -> None:
    """A column has the type of its values. A column with values of several types holds them as JSON text."""
    pyarrow = import_pyarrow()
    types: dict[str, Any] = {}
    for rows in _batched(_rows(results())):
        for name in dict.fromkeys(name for row in rows for name in row):
            types[name] = _common_type(types.get(name), [_utf8(row.get(name)) for row in rows], pyarrow)
    names = _ordered(types)
    text = pyarrow.string()  # also of a column without any value
    kinds = [types.get(name) for name in names]
    storable = [text if kind in (None, _MIXED, pyarrow.null()) else kind for kind in kinds]
    schema = pyarrow.schema(list(zip(names, storable, strict=True)))
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for rows in _batched(_rows(results())):
            columns = []
            for name, field in zip(names, schema, strict=True):
                values = [row.get(name) for row in rows]
                if types.get(name) == _MIXED:
                    values = list(map(_as_text, values))
                columns.append(pyarrow.array(list(map(_utf8, values)), field.type))
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))


def _batched(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while batch := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        yield batch


def _utf8(value: Any) -> Any:
    """A lone surrogate cannot be written as UTF-8: it becomes the escape that JSON has for it."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def _common_type(known: Any, values: list[Any], pyarrow: Any) -> Any:
    """The type that holds these values and those of the type ``known``; _MIXED if there is none."""
    if known is _MIXED:
        return _MIXED
    try:
        kinds = [kind for kind in (known, pyarrow.array(values).type) if kind is not None]
        schemas = [pyarrow.schema([("_", kind)]) for kind in kinds]
        return pyarrow.unify_schemas(schemas, promote_options="permissive").field("_").type
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):
        return _MIXED
