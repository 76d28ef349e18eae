"""Results, one JSON object a line -> CSV and Parquet."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .output import ResultLayout
from .paths import write_all
from .table_inputs import import_pyarrow

_ROWS_HELD = 2048

ReadResults = Callable[[], Iterator[bytes]]  # called once for each pass over the results


def _rows(lines: Iterable[bytes], layout: ResultLayout) -> Iterator[dict[str, Any]]:
    for line in lines:
        yield from layout.table_rows(json.loads(line))


def _ordered(names: Mapping[str, Any], layout: ResultLayout) -> list[str]:
    first, last = layout.first_columns, layout.last_columns
    between = [name for name in names if name not in (*first, *last)]
    return [*(name for name in first if name in names), *between, *last]


def write_csv(descriptor: int, results: ReadResults, delimiter: str, layout: ResultLayout) -> None:
    """Lists and objects are JSON in their cell; a missing value is an empty cell."""
    names = _ordered(dict.fromkeys(name for row in _rows(results(), layout) for name in row), layout)
    text = io.StringIO(newline="")
    # "\r\n", so that cells with either character are quoted; written to the file as "\n".
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\r\n")
    written: list[str] = []
    for row in itertools.chain([dict(zip(names, names, strict=True))], _rows(results(), layout)):
        writer.writerow([_cell(row.get(name)) for name in names])
        written.append(text.getvalue().removesuffix("\r\n"))
        text.seek(0)
        text.truncate()
        if len(written) == _ROWS_HELD:
            _flush(written, descriptor)
    _flush(written, descriptor)


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _flush(rows: list[str], descriptor: int) -> None:
    write_all(descriptor, "".join([f"{row}\n" for row in rows]).encode("utf-8", "backslashreplace"))
    rows.clear()


def write_parquet(descriptor: int, results: ReadResults, layout: ResultLayout) -> None:
    """A column has the type of its values. A column with values of several types holds them as JSON text."""
    pyarrow = import_pyarrow()
    types: dict[str, Any] = {}
    for rows in _batched(_rows(results(), layout)):
        for name in dict.fromkeys(name for row in rows for name in row):
            types[name] = _common_type(types.get(name), _arrow_type(_values(rows, name), pyarrow), pyarrow)
    kinds = {name: types.get(name) for name in _ordered(types, layout)}
    schema = pyarrow.schema([(name, _storable(kind, pyarrow)) for name, kind in kinds.items()])
    with open(descriptor, "wb", closefd=False) as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for rows in _batched(_rows(results(), layout)):
            columns = []
            for name, field in zip(kinds, schema, strict=True):
                values = _values(rows, name)
                if kinds[name] is _MIXED:
                    values = [_text(_cell(value)) for value in values]
                columns.append(pyarrow.array(values, field.type))
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))


_MIXED = "values of several types"


def _batched(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _ROWS_HELD:
            yield batch
            batch = []
    if batch:
        yield batch


def _values(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [_text(row.get(name)) for row in rows]


def _text(value: Any) -> Any:
    """A lone surrogate cannot be written as UTF-8: it becomes the escape that JSON has for it."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def _arrow_type(values: list[Any], pyarrow: Any) -> Any:
    try:
        return pyarrow.array(values).type
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):
        return _MIXED


def _common_type(one: Any, other: Any, pyarrow: Any) -> Any:
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
    """The type in the file: a column without any value is text."""
    if kind is None or kind is _MIXED or pyarrow.types.is_null(kind):
        return pyarrow.string()
    return kind
