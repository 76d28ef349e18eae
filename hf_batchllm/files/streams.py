"""Results to stdout, a pipe or a device: what is written there cannot be continued, and has no order."""

from __future__ import annotations

import os
import re
import select
import stat
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import OutputFileError, OutputWriteError
from .paths import reason
from .run_record import RunRecord
from .sources import Source

_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_STANDARD_STREAMS = {"-": 1, "/dev/stdout": 1, "/dev/stderr": 2}


def _descriptor_of(path: str) -> int | None:
    """The descriptor of this process that the name stands for, if it is such a name."""
    found = _DESCRIPTOR.fullmatch(path)
    return int(found[1]) if found else _STANDARD_STREAMS.get(path)


def is_stream(path: str) -> bool:
    if _descriptor_of(path) is not None:
        return True
    try:
        mode = os.stat(os.path.expanduser(path)).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


class StreamOutput:
    """It has the methods of ``FileOutput``."""

    started = False
    kept = ""

    def __init__(self, path: str, source: Source | None = None) -> None:
        self.path = path
        self.name = "stdout" if path == "-" else path
        self._written = 0
        try:
            own = _descriptor_of(path)  # not opened again: a file would be written to from another place of it
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND) if own is None else os.dup(own)
            if own is not None:
                os.write(own, b"")  # fails now if it is open for reading alone
        except OSError as error:
            raise OutputFileError(f"{self.name} cannot be written to: {reason(error)}") from error
        if source is not None and source.is_file(self._descriptor):
            self.close()
            raise OutputFileError(f"{source.name} is the input, and {self.name} leads to it: give another output")

    def __len__(self) -> int:
        return self._written

    def begin(self, asked: RunRecord, numbers: np.ndarray, *_: Any, **unused: Any) -> RunRecord:
        self._numbers = numbers
        self.is_error = np.zeros(len(numbers), dtype=bool)
        return asked.begun(None)

    def missing(self) -> np.ndarray:
        return self._numbers

    def start(self, model: Mapping[str, str]) -> None:
        """Nothing is compared: a stream has no earlier parts."""

    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        for _, line in lines:
            rest = memoryview(line + b"\n")
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:  # another process has made it non-blocking
                    select.select([], [self._descriptor], [])
                except OSError as error:
                    raise OutputWriteError(
                        f"{self.name} cannot be written to any more: {reason(error)}. "
                        f"{self._written:,} results were written; a stream cannot be continued, a file can",
                        kept=self._written,
                        number=error.errno,
                    ) from error
            self._written += 1

    def finish(self, order: str = "input", figures: Mapping[str, Any] | None = None) -> None:
        """There is nothing to put in order."""

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __enter__(self) -> StreamOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
