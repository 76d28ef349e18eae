"""Rows: what BatchResult and ScoreResult have in common. They are a sequence, a table and a picture."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, overload

from ..wording import counted
from .dataframes import Columns, columns_of, dataset_of, table_of, write_json_lines
from .run_report import RunReport, interrupted
from .views.html import caption, view

if TYPE_CHECKING:
    import datasets
    import pandas

_CHARACTERS = 80  # of a value in a repr
_IDS = 6


R = TypeVar("R")


class Rows(Sequence[R]):
    """A slice has the same report, which is that of the whole call. Results with equal rows are equal."""

    _thing: ClassVar[str]  # what a row is
    _given: ClassVar[str]  # what it has an index of
    _fields: ClassVar[str]  # columns of a table
    _is_slice = False  # then the report is about more rows than these
    _index: Any = None  # of the pandas Series that the call was given

    def __init__(self, rows: Sequence[R], report: RunReport | None) -> None:
        self._rows = list(rows)
        self.report = report

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: Any) -> R | Self:
        rows = self._rows
        try:
            found: R | list[R] = rows[index]
        except IndexError:
            last = f", 0 to {len(rows) - 1:,}" if rows else ""
            raise IndexError(f"there is no row {index}: the result has {counted(len(rows), 'row')}{last}") from None
        except TypeError:
            instead = ""
            if isinstance(index, str):
                how = f", as result[0].{index}" if rows and hasattr(rows[0], index) else ""
                instead = f": first the row, then the field{how}"
            raise TypeError(f"a row is asked for by its number or a slice, not by {index!r:.40}{instead}") from None
        if not isinstance(found, list):
            return found
        part = self._part(found)
        part._index = self._index
        part._is_slice = self._is_slice or len(found) < len(rows)
        return part

    def __eq__(self, other: object) -> bool:
        if isinstance(other, type(self)):
            return self._rows == other._rows
        return self._rows == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as that of a list

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[R]:
        return iter(self._rows)

    def to_pandas(self, *, ids: bool = True) -> pandas.DataFrame:
        """A DataFrame with one row for each of these: its fields, and its numbers of tokens. Row ``k`` is ``self[k]``.

        Prompts or contexts come first and token ids come last; ``ids=False`` leaves these out. Where the prompts were a
        pandas Series, a row's label is that of its prompt. There are columns for ``score``, ``adapter``, ``logprobs``
        and ``prompt_logprobs`` if any row has them.
        """
        return table_of(self._columns(ids), self._index)

    def to_jsonl(self, path: str | os.PathLike[str], *, ids: bool = True) -> None:
        """Write a JSON object for each row, one a line, with the columns of ``to_pandas``.

        A file that is there already is replaced. To generate into one that is too large for memory, use ``run_file``.
        """
        write_json_lines(self._columns(ids), path)

    def to_dataset(self, *, ids: bool = True) -> datasets.Dataset:
        """A ``datasets.Dataset`` with the columns of ``to_pandas``.

        Chats are lists of messages; where strings stand among them, or content that is not text, they are JSON text.
        """
        return dataset_of(self._columns(ids))

    def _columns(self, ids: bool) -> Columns:
        return columns_of(self._rows, self._fields, ids)

    def __repr__(self) -> str:
        shown = [f"  [{place}] {line}" for place, line in enumerate(self._lines())]
        if hidden := len(self) - len(shown):
            shown.append(f"  ... and {hidden:,} more")
        return "\n".join([self._headline(), *shown])

    def _headline(self) -> str:
        """The rows of an interrupted call must not look like those of all prompts."""
        name, rows, report = type(self).__name__, counted(len(self), self._thing), self._interrupted()
        if report is None:
            return f"{name} of {rows}"
        total = counted(report.sequences, self._thing)
        if self._is_slice:
            return f"{name} of {rows}, a slice; interrupted, {report.finished:,} of {total} had finished"
        return f"{name}, interrupted: {len(self):,} of {total}, not aligned with the {self._given}s (see .index)"

    def _repr_html_(self) -> str:
        report, table = self.report, self._table() if self._rows else ""
        if report is not None:
            whole = self._is_slice or report.finished < report.sequences
            went = self._how_it_went(report)
            sentence = f"The whole call: {went}" if whole else went[0].upper() + went[1:]
            warning = interrupted(report, ". Rows are not aligned with the list that was passed: use .index")
            table = f"{warning}{table}{caption(f'{sentence}. More in .report')}"
        return view(counted(len(self), self._thing), table, repr(self))

    def _interrupted(self) -> RunReport | None:
        """The report of a call that did not come to its end."""
        report = self.report
        return report if report is not None and report.finished < report.sequences else None

    @abstractmethod
    def _part(self, rows: list[R]) -> Self:
        """These rows alone."""

    @abstractmethod
    def _lines(self) -> list[str]:
        """The first rows, a line each."""

    @abstractmethod
    def _table(self) -> str:
        """The rows as HTML."""

    @abstractmethod
    def _how_it_went(self, report: RunReport) -> str:
        """The call in some words."""


def short_text(value: Any) -> str:
    """The repr of a text, its beginning and end if it is long; a chat by its last message."""
    if isinstance(value, list):
        message = value[-1] if value else {}
        before = f"{len(value) - 1} before, " if len(value) > 1 else ""
        return f"<chat: {before}{message.get('role', '?')} {short_text(message.get('content'))}>"
    if isinstance(value, str) and len(value) > _CHARACTERS:
        half = _CHARACTERS // 2
        return repr(f"{value[:half]} ... {value[-half:]}")
    shown = repr(value)
    return shown if isinstance(value, str) or len(shown) <= _CHARACTERS else f"{shown[:_CHARACTERS]}..."


def short_ids(ids: Sequence[int]) -> str:
    if len(ids) <= _IDS:
        return repr(list(ids))
    return f"[{', '.join(map(str, ids[:_IDS]))}, ... {len(ids):,} in all]"


def _how_many(values: Sequence[Any]) -> str:
    return f"<of {len(values):,} tokens>"


_SHOWN: dict[str, Callable[[Any], str]] = {
    "token_ids": short_ids,
    "prompt_token_ids": short_ids,
    "logprobs": _how_many,
    "prompt_logprobs": _how_many,
    "logprob": "{:.4f}".format,
}


def row_repr(row: object, fields: str) -> str:
    """A row in a line. ``fields``: in their order; one with a "?" is left out where it is None."""
    values = {field: getattr(row, field.removesuffix("?")) for field in fields.split()}
    said = {field.removesuffix("?"): value for field, value in values.items() if value is not None or field[-1] != "?"}
    shown = (f"{name}={_SHOWN.get(name, short_text)(value)}" for name, value in said.items())
    return f"{type(row).__name__}({', '.join(shown)})"
