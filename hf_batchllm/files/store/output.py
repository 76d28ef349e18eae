"""What every output does: a file that a later run continues, or a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .run_record import RunRecord
from .shards import Part
from .sources import Source

ORDERS = ("input", "finished")

LineIdentity = tuple[int, str, bool]  # (the record's number, the record's key, whether the result is an error)


@dataclass(frozen=True)
class ResultLayout:
    """All that outputs know of what a line of results means. Each line is a JSON object.

    identify: tells which record a line answers; None for a line that is no result.
    table_rows: the rows that a line becomes in a table.
    first_columns, last_columns: of a table; the last ones are there even if no row has a value.
    """

    identify: Callable[[dict[str, Any]], LineIdentity | None]
    table_rows: Callable[[dict[str, Any]], Iterator[dict[str, Any]]]
    first_columns: tuple[str, ...] = ()
    last_columns: tuple[str, ...] = ()


class Output(ABC):
    """See the docstring of ``files`` for the order of the calls."""

    path: str
    streams: bool  # cannot be continued, and has no order
    complete = False  # a finished table: nothing to do
    _count = 0  # records that the run has

    @abstractmethod
    def __len__(self) -> int:
        """How many results it holds."""

    @property
    def errors(self) -> np.ndarray:
        """The numbers of the records whose result in an earlier run is an error."""
        return np.zeros(0, dtype=np.int64)

    @abstractmethod
    def begin(
        self,
        record: RunRecord,
        source: Source,
        *,
        limit: int | None = None,
        retry_errors: bool = False,
        part: Part | None = None,
    ) -> RunRecord:
        """The run record in force, with its seed. RunChangedError if a setting, or a record with a result, has changed.

        ``limit``: how many records are run, from the first on. ``retry_errors``: drops results that are errors, so that
        their records run again. ``part``: which of the records are run; by default all.
        """

    def confirm_model(self, fingerprint: dict[str, str]) -> None:
        """Before the first result. RunChangedError if an earlier part of the run had another model or tokenizer."""
        return  # a stream has no earlier parts

    def missing(self, count: int | None = None) -> np.ndarray:
        """The numbers of the records without a result, among the first ``count`` (by default ``limit``)."""
        return np.arange(self._count if count is None else min(count, self._count))

    @abstractmethod
    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        """Each is (the record's number, a JSON object on one line, without the newline)."""

    @abstractmethod
    def finish(self, *, order: str = "input", figures: dict[str, Any] | None = None) -> None:
        """Called when no result is missing. ``order``: one of ORDERS. Writes the table, if the output is one."""

    @abstractmethod
    def close(self) -> None:
        """Appended results stay."""

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
