"""Results, one JSON object a line -> CSV and Parquet, a row for each sample."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .paths import write_all
from .tables import import_pyarrow

_FIRST = ("index", "id", "sample")
_LAST = ("error",)
_LEFT_OUT = ("key", "samples")
_ROWS = 2048  # held at a time

Lines = Callable[[], Iterator[bytes]]  # may be asked for them more than once


def rows_of(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each sample: what the record says for all of them, and what the sample says."""
    shared = {name: value for name, value in record.items() if name not in _LEFT_OUT}
    samples = record.get("samples")
    if not isinstance(samples, list) or not samples:
        yield shared
        return
    for number, sample in enumerate(samples):
        yield {**shared, "sample": number, **(sample if isinstance(sample, dict) else {"text": sample})}


def _rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        yield from rows_of(json.loads(line))


def _ordered(names: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys([*names, *_LAST]))
    first = [name for name in _FIRST if name in names]
    return [*first, *(name for name in names if name not in (*_FIRST, *_LAST)), *_LAST]


def write_csv(descriptor: int, lines: Lines, delimiter: str) -> None:
    """Lists and objects are JSON in their cell; what is missing is an empty cell."""
    names = _ordered(dict.fromkeys(name for row in _rows(lines()) for name in row))
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\r\n")  # so that it quotes cells with either in them
    written: list[str] = []
    for row in itertools.chain([dict(zip(names, names, strict=True))], _rows(lines())):
        writer.writerow([_cell(row.get(name)) for name in names])
        written.append(text.getvalue().removesuffix("\r\n"))
        text.seek(0)
        text.truncate()
        if len(written) == _ROWS:
            _flush(written, descriptor)
    _flush(written, descriptor)


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _flush(rows: list[str], descriptor: int) -> None:
    write_all(descriptor, "".join([f"{row}\n" for row in rows]).encode("utf-8", "backslashreplace"))
    rows.clear()


def write_parquet(descriptor: int, lines: Lines) -> None:
    """Columns have the types that their values have. One with values of several kinds holds them as JSON text."""
    pyarrow = import_pyarrow()
    types: dict[str, Any] = {}
    for rows in _batched(_rows(lines())):
        for name in dict.fromkeys(name for row in rows for name in row):
            types[name] = _joined(types.get(name), _type(_values(rows, name), pyarrow), pyarrow)
    kinds = {name: types.get(name) for name in _ordered(types)}
    schema = pyarrow.schema([(name, _storable(kind, pyarrow)) for name, kind in kinds.items()])
    with open(descriptor, "wb", closefd=False) as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for rows in _batched(_rows(lines())):
            columns = []
            for name, field in zip(kinds, schema, strict=True):
                values = _values(rows, name)
                if kinds[name] is _MIXED:
                    values = [_text(_cell(value)) for value in values]
                columns.append(pyarrow.array(values, field.type))
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))


_MIXED = "values of several kinds"


def _batched(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _values(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [_text(row.get(name)) for row in rows]


def _text(value: Any) -> Any:
    """Half of a pair of surrogates cannot be written as UTF-8: the escape that JSON has for it stands there then."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def _type(values: list[Any], pyarrow: Any) -> Any:
    try:
        return pyarrow.array(values).type
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):
        return _MIXED


def _joined(one: Any, other: Any, pyarrow: Any) -> Any:
    if one is None or one is other:
        return other
    if one is _MIXED or other is _MIXED:
        return _MIXED
    try:
        schemas = [pyarrow.schema([("_", kind)]) for kind in (one, other)]
        return pyarrow.unify_schemas(schemas, promote_options="permissive").field("_").type
    except pyarrow.ArrowException:
        return _MIXED


def _storable(kind: Any, pyarrow: Any) -> Any:
    """As Parquet has it: a column without any value, or an object without fields, is text."""
    if kind is None or kind is _MIXED or pyarrow.types.is_null(kind):
        return pyarrow.string()
    return kind
