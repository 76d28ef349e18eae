"""Results to stdout, a pipe or a device: what is written there cannot be continued, and has no order."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import OutputFileError, OutputWriteError
from .paths import reason
from .run_record import RunRecord
from .sources import Source

_STDOUT = ("-", "/dev/stdout")  # written to where it stands, also where it is redirected to a file


def is_stream(path: str) -> bool:
    there = os.path.expanduser(path)
    return path in _STDOUT or (os.path.exists(there) and not os.path.isfile(there) and not os.path.isdir(there))


class StreamOutput:
    """It has the methods of ``FileOutput``."""

    started = False
    kept = ""

    def __init__(self, path: str, source: Source | None = None) -> None:
        self.path = path
        self.name = "stdout" if path == "-" else path
        self._written = 0
        try:
            if path in _STDOUT:
                os.write(1, b"")  # fails now if it is open for reading alone
                self._descriptor = os.dup(1)
            else:
                self._descriptor = os.open(os.path.expanduser(path), os.O_WRONLY | os.O_APPEND)
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
                except OSError as error:
                    raise OutputWriteError(
                        f"{self.name} cannot be written to any more: {reason(error)}. "
                        f"{self._written:,} results were written; a stream cannot be continued, a file can",
                        kept=self._written,
                        number=error.errno,
                    ) from error
            self._written += 1

    def finish(self, figures: Mapping[str, Any] | None = None) -> None:
        """There is nothing to put in order."""

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __enter__(self) -> StreamOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
