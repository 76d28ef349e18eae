"""Where results go: a file that a later run can go on with, or a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .run_record import RunRecord
from .sources import Source

# What a line of an output says of itself: (index, key, is an error); None: it is not ours.
Identify = Callable[[dict[str, Any]], tuple[int, str, bool] | None]


def open_output(
    path: str,
    format: str | None = None,  # jsonl, csv, tsv, parquet; else the suffix says; "-" and what is no file: a stream
    *,
    source: Source | None = None,  # must not be the same file
    fsync: str | float = "5s",  # "always", "never", or seconds
    restart: bool = False,
    identify: Identify | None = None,  # plain records and those of OpenAI's batches are known
    note: Callable[[str], None] | None = None,  # what a person should hear; a warning otherwise
) -> Output:
    """Locks it, and reads what is in it. Nothing is changed before ``begin``."""
    raise NotImplementedError


class Output:
    path: str
    streams: bool  # no resume, no order
    complete: bool  # a table that is there already: nothing to do
    done: int  # results in it
    errors: np.ndarray  # the numbers of those that are errors

    def begin(self, record: RunRecord, *, retry_errors: bool = False) -> RunRecord:
        """The record in force, with its seed. RunChangedError where it differs from the one beside the output."""
        raise NotImplementedError

    def check(self, source: Source) -> None:
        """RunChangedError where a record that is done has changed in the input since."""
        raise NotImplementedError

    def missing(self, count: int) -> np.ndarray:
        """The numbers below ``count`` that have no result."""
        raise NotImplementedError

    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        """(index, JSON without a newline) of each; on the disk as whole lines or not at all."""
        raise NotImplementedError

    def finish(self, *, order: str = "input", figures: dict[str, Any] | None = None) -> None:
        """Everything is there: puts it in order ("finished": as it is), or writes the table."""
        raise NotImplementedError

    def close(self) -> None:
        """Of an unfinished run too; what was appended stays."""
        raise NotImplementedError
