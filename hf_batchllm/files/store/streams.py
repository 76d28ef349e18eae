"""What every output does, and the one that is no file: stdout, a pipe, a device."""

from __future__ import annotations

import os
import re
import select
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import OutputFileError, OutputWriteError
from .paths import reason
from .run_record import RunRecord
from .sources import Source

_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_NAMED = {"-": 1, "/dev/stdout": 1, "/dev/stderr": 2}


def descriptor_of(path: str) -> int | None:
    """Of a name that stands for a descriptor of this process."""
    found = _DESCRIPTOR.fullmatch(path)
    return int(found[1]) if found else _NAMED.get(path)


def is_stream(path: str) -> bool:
    if descriptor_of(path) is not None:
        return True
    try:
        mode = os.stat(os.path.expanduser(path)).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


class Output(ABC):
    """What the two kinds have in common; see the package's docstring for the order of the calls."""

    path: str
    streams: bool  # no resume, no order
    complete = False  # a table that is there already: nothing to do
    _count = 0  # records that are asked for

    @abstractmethod
    def __len__(self) -> int:
        """Results in it."""

    @property
    def errors(self) -> np.ndarray:
        """The numbers of the records whose result, of an earlier run, is an error."""
        return np.zeros(0, dtype=np.int64)

    @abstractmethod
    def begin(
        self, record: RunRecord, source: Source, *, limit: int | None = None, retry_errors: bool = False
    ) -> RunRecord:
        """The record in force, with its seed. RunChangedError where a setting or an input that is done has changed.

        ``limit``: of the records, only the first ones are run. ``retry_errors``: results that are errors go first.
        """

    def confirm_weights(self, weights: str) -> None:
        """Before the first result. RunChangedError where an earlier part of the run had a model with others."""
        return  # where there are no earlier parts

    def missing(self, count: int | None = None) -> np.ndarray:
        """The numbers of the records (the first ``count``; else ``limit``) that have no result."""
        return np.arange(self._count if count is None else min(count, self._count))

    @abstractmethod
    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        """(index, a JSON object with ``index`` and ``key`` in one line without its newline) for each."""

    @abstractmethod
    def finish(self, *, order: str = "input", figures: dict[str, Any] | None = None) -> None:
        """When nothing is missing: in the input's order, or as they ``finished``; or as a table."""

    @abstractmethod
    def close(self) -> None:
        """What was appended stays."""

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StreamOutput(Output):
    streams = True

    def __init__(self, path: str, source: Source | None = None) -> None:
        self.path = path
        self.name = "stdout" if path == "-" else path
        self._written = 0
        try:
            own = descriptor_of(path)  # not opened anew, which for a file would begin at its first byte
            self._descriptor = os.dup(own) if own is not None else os.open(path, os.O_WRONLY | os.O_APPEND)
            if own is not None:
                os.write(own, b"")  # one that is open for reading alone says so now
        except OSError as error:
            raise OutputFileError(f"{self.name} cannot be written to: {reason(error)}") from error
        if source is not None and source.is_file(self._descriptor):
            self.close()
            raise OutputFileError(f"{source.name} is the input, and {self.name} leads to it: give another output")

    def __len__(self) -> int:
        return self._written

    def begin(
        self, record: RunRecord, source: Source, *, limit: int | None = None, retry_errors: bool = False
    ) -> RunRecord:
        self._count = source.count if limit is None else min(limit, source.count)
        return record.begin(None, source.summary())

    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        for _, line in lines:
            rest = memoryview(line + b"\n")
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:  # somebody else has made it one that does not wait
                    select.select([], [self._descriptor], [])
                except OSError as error:
                    raise OutputWriteError(
                        f"{self.name} cannot be written to any more: {reason(error)}. "
                        f"{self._written:,} results were written; a stream cannot be gone on with, a file can",
                        kept=self._written,
                        number=error.errno,
                    ) from error
            self._written += 1

    def finish(self, *, order: str = "input", figures: dict[str, Any] | None = None) -> None:
        pass

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
