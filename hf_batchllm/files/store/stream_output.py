"""The output that is no ordinary file: stdout, a pipe, a device. It cannot be continued."""

from __future__ import annotations

import os
import re
import select
import stat
from collections.abc import Sequence
from typing import Any

from ...errors import OutputFileError, OutputWriteError
from .output import Output
from .paths import reason
from .run_record import RunRecord
from .shards import Part
from .sources import Source

_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_STANDARD_STREAMS = {"-": 1, "/dev/stdout": 1, "/dev/stderr": 2}


def descriptor_of(path: str) -> int | None:
    """The descriptor of this process that the name stands for, if it is such a name."""
    found = _DESCRIPTOR.fullmatch(path)
    return int(found[1]) if found else _STANDARD_STREAMS.get(path)


def is_stream(path: str) -> bool:
    if descriptor_of(path) is not None:
        return True
    try:
        mode = os.stat(os.path.expanduser(path)).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


class StreamOutput(Output):
    streams = True

    def __init__(self, path: str, source: Source | None = None) -> None:
        self.path = path
        self.name = "stdout" if path == "-" else path
        self._written = 0
        try:
            own = descriptor_of(path)  # not opened again: a file would be written to from its first byte
            self._descriptor = os.dup(own) if own is not None else os.open(path, os.O_WRONLY | os.O_APPEND)
            if own is not None:
                os.write(own, b"")  # fails now if it is open for reading alone
        except OSError as error:
            raise OutputFileError(f"{self.name} cannot be written to: {reason(error)}") from error
        if source is not None and source.is_file(self._descriptor):
            self.close()
            raise OutputFileError(f"{source.name} is the input, and {self.name} leads to it: give another output")

    def __len__(self) -> int:
        return self._written

    def begin(
        self,
        record: RunRecord,
        source: Source,
        *,
        limit: int | None = None,
        retry_errors: bool = False,
        part: Part | None = None,
    ) -> RunRecord:
        if part is not None:
            raise OutputFileError(f"a part of a file is written to a file, and {self.name} is a stream")
        self._count = source.count if limit is None else min(limit, source.count)
        return record.begin(None, source.summary())

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

    def finish(self, *, order: str = "input", figures: dict[str, Any] | None = None) -> None:
        pass

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
