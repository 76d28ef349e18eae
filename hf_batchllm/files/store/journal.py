"""A file of results, one JSON object a line, that is only ever appended to by whole lines.

A process that is killed at any moment leaves the finished results, and at most half a line at the end, which the next
run cuts off. After a power cut, the last lines may be zeros instead.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...errors import OutputBusyError, OutputFileError, OutputWriteError
from .journal_index import JournalIndex
from .lines import Lines, ShortRead, find_lines
from .locks import has_name, lock
from .output import LineIdentity
from .paths import reason, replacing, write_all
from .syncing import Syncing

_REMEDIES = {
    errno.ENOSPC: "Make room there, and the",
    errno.EDQUOT: "Make room there, and the",
    errno.EFBIG: "Raise the limit, and the",
}
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class Journal:
    """Opened and locked at once; nothing is changed before ``repair``."""

    def __init__(
        self,
        path: str,  # no link
        *,
        fsync: str | float = "5s",
        identify: Callable[[dict[str, Any]], LineIdentity | None],
        note: Callable[[str], None],
        busy: Callable[[], str],  # the error when another process writes to it
    ) -> None:
        self.path = path
        self._identify = identify
        self._note = note
        self._busy = busy
        self._index = JournalIndex()
        self._settled = 0, 0  # how many results of the index are certain, and where the last of them ends
        self._pending: list[tuple[int, int]] = []  # (record's number, bytes) of the results that are being appended
        self._repairs: list[str] = []
        self._must_rewrite = False  # lines that others follow are to be dropped
        self._failed: OutputWriteError | None = None
        self._scanned = self._begun = False
        self._descriptor = -1
        self._syncing = Syncing(fsync)
        self._open()

    def _open(self) -> None:
        while True:
            self._created = not os.path.lexists(self.path)
            self._descriptor = os.open(self.path, _FLAGS, 0o666)
            try:
                if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                    raise OutputFileError(f"{self.path} is no ordinary file")
                if not lock(self._descriptor, self.path, self._note):
                    raise OutputBusyError(self._busy())
                if has_name(self._descriptor, self.path):
                    self._syncing.begin(self._descriptor)
                    return
            except BaseException:
                os.close(self._descriptor)
                self._descriptor = -1
                raise
            os.close(self._descriptor)

    # Results of earlier runs

    def scan(self) -> None:
        """Reads the results that are there, and finds what has to be repaired. OutputFileError for other lines."""
        self._scanned = True
        lines = find_lines(self._descriptor)
        last = len(lines) - 1
        for chunk in lines.chunks():
            for number, raw in zip(chunk.tolist(), lines.read(chunk), strict=True):
                whole = number < last or lines.ended
                identity = self._identity(raw) if whole else None
                if identity is None:
                    self._odd_line(lines, number, raw, whole)
                    continue
                record, key, is_error = identity
                self._index.add(record, int(lines.starts[number]), int(lines.sizes[number]) + 1, is_error)
                self._index.add_key(int(key, 16))
        self._settled = len(self), self._index.end
        self._must_rewrite |= self._index.total_size < self._index.end  # blank lines, and damaged ones
        duplicates = self._index.duplicates()
        if len(duplicates):
            self._repairs.append(f"{len(duplicates):,} results were there twice, and are dropped")
            self._must_rewrite = True
            self._keep(np.setdiff1d(np.arange(len(self)), duplicates))

    def _identity(self, raw: bytes) -> LineIdentity | None:
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        return self._identify(record) if isinstance(record, dict) else None

    def _odd_line(self, lines: Lines, number: int, raw: bytes, whole: bool) -> None:
        if b"\0" in raw:  # in no JSON: a file system leaves zeros where it did not get to write
            self._repairs.append(f"line {lines.line(number):,} was damaged by a crash of the system, and is dropped")
        elif number == len(lines) - 1 and not (whole and _is_json(raw)):
            self._repairs.append("half a line at its end is cut off")
        else:
            raise OutputFileError(
                f"{self.path}, line {lines.line(number):,}: this is not a result of such a run. Nothing was changed. "
                "Take the line out, give another output, or begin afresh with `--restart`"
            )

    def __len__(self) -> int:
        return len(self._index)

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    @property
    def created(self) -> bool:
        """Whether the file was made by this object."""
        return self._created

    @property
    def empty(self) -> bool:
        """Not even half a line."""
        return os.fstat(self._descriptor).st_size == 0

    @property
    def numbers(self) -> np.ndarray:
        """[results] The number of the record that each one answers, in the order of the lines."""
        return self._index.numbers

    @property
    def errors(self) -> np.ndarray:
        """The numbers of the records whose result is an error."""
        return np.sort(self.numbers[self._index.is_error])

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """([results] the numbers of the records, ascending; their keys, as 48-bit numbers). Until ``repair``."""
        return self._index.keys()

    # Changes

    def repair(self, *, drop_errors: bool = False) -> None:
        """Cuts off half a line and drops what ``scan`` found; ``drop_errors`` drops errors, too, to run them again."""
        self._begun = True
        self._index.forget_keys()
        try:
            if self._scanned and os.fstat(self._descriptor).st_size > self._settled[1]:
                os.ftruncate(self._descriptor, self._settled[1])
            is_error = self._index.is_error
            drop_errors = drop_errors and bool(is_error.any())
            if self._must_rewrite or drop_errors:
                self._rewrite(np.flatnonzero(~is_error) if drop_errors else np.arange(len(self)))
                self._must_rewrite = False
        except OSError as error:
            raise self._write_error(error, "could not be repaired") from error
        if self._repairs:
            shown = self._repairs[:5] + [f"and {len(self._repairs) - 5:,} more"] * (len(self._repairs) > 5)
            self._note(f"{self.path}: {'; '.join(shown)} (records without a result run again)")
            self._repairs = []

    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        """Each is (the record's number, JSON without a newline). A full disk keeps those that fitted whole."""
        if self._failed is not None:
            raise self._failed
        if self._pending:
            self._settle()
        data = b"".join([part for _, line in lines for part in (line, b"\n")])
        if data.count(b"\n") != len(lines):
            raise ValueError("a result must be one line of JSON")
        self._pending = [(number, len(line) + 1) for number, line in lines]
        try:
            write_all(self._descriptor, data)
            self._settle(known=len(data))
            self._syncing.written()
        except OSError as error:
            raise self._write_error(error, "could not be written") from error

    def _settle(self, known: int | None = None) -> None:
        """Enters the results that have been written into the index. An interrupt may have stopped the write, or an
        earlier call of this, anywhere: ``_settled`` says which part of the index is certain. Half a line is cut off."""
        count, end = self._settled
        self._index.shorten(count)
        size = end + known if known is not None else os.fstat(self._descriptor).st_size
        for number, length in self._pending:
            if end + length > size:
                os.ftruncate(self._descriptor, end)
                break
            self._index.add(number, end, length)
            end += length
        self._settled = len(self), end
        self._pending = []

    def _write_error(self, error: OSError, what: str) -> OutputWriteError:
        with contextlib.suppress(OSError):  # the next run does it then
            self._settle()
        remedy = _REMEDIES.get(error.errno or 0, "The")
        self._failed = OutputWriteError(
            f"{self.path} {what}: {reason(error)}. {len(self):,} results are kept. {remedy} same command continues",
            kept=len(self),
            number=error.errno,
        )
        return self._failed

    def _keep(self, places: np.ndarray) -> None:
        self._index.keep(places)
        self._settled = len(places), self._settled[1]

    def _rewrite(self, places: np.ndarray) -> None:
        """Writes the lines at these places, in this order, to a new file, which takes the name once it is whole."""
        self._syncing.end()
        try:
            with replacing(self.path) as descriptor:
                lock(descriptor, self.path)  # before it has its name, so that no other run can lock it first
                sizes = array("q")
                for lines in self._read(places):
                    sizes.extend(len(line) + 1 for line in lines)
                    write_all(descriptor, b"\n".join([*lines, b""]))
        except BaseException:
            if not has_name(self._descriptor, self.path):  # interrupted after the exchange
                self._failed = OutputWriteError(f"{self.path} was interrupted while it was rewritten", len(places))
            raise
        old, self._descriptor = self._descriptor, descriptor
        os.close(old)
        self._keep(places)
        end = self._index.place_anew(sizes)
        self._settled = len(places), end
        self._syncing.begin(descriptor)

    def _read(self, places: np.ndarray) -> Iterator[list[bytes]]:
        """The lines at these places, as many at a time as are comfortably held."""
        starts, sizes = self._index.starts, self._index.sizes - 1
        lines = Lines(self._descriptor, starts, sizes, np.zeros(0, dtype=np.int64), self._settled[1], True)
        for chunk in lines.chunks(places):
            try:
                yield lines.read(chunk)
            except ShortRead:
                raise OSError(errno.EIO, "the file has become shorter") from None

    # At the end

    def put_in_order(self) -> None:
        """By the numbers of the records. Without space for a copy, the lines stay as they came."""
        self._finish_append()
        self._restore_name()
        order = self._index.order()
        if np.array_equal(order, np.arange(len(order))):
            return
        try:
            self._rewrite(order)
        except OSError as error:
            self._note(
                f"{self.path} is complete, but its results stay in the order in which they finished: "
                f"a copy in the input's order could not be made ({reason(error)})"
            )

    def in_order(self) -> Iterator[bytes]:
        """The lines, by the numbers of the records."""
        self._finish_append()
        for lines in self._read(self._index.order()):
            yield from lines

    def pieces(self, wanted: np.ndarray) -> Iterator[list[tuple[int, bytes]]]:
        """(the record's number, its line), as many at a time as are comfortably held. ``wanted``: [records] which."""
        numbers = self.numbers
        places = np.flatnonzero(wanted[numbers])
        first = 0
        for lines in self._read(places):
            of_these = numbers[places[first : first + len(lines)]].tolist()
            first += len(lines)
            yield list(zip(of_these, lines, strict=True))

    def _finish_append(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._pending:
            self._settle()

    def _restore_name(self) -> None:
        """Brings the results back under their name if the file was removed or replaced meanwhile."""
        if not self._begun or has_name(self._descriptor, self.path):
            return
        here, number = self.path, 1
        if os.path.lexists(here):  # it may be another run's
            while os.path.lexists(f"{here}.rescued-{number}"):
                number += 1
            self.path = f"{here}.rescued-{number}"
        try:
            self._rewrite(np.arange(len(self)))
        except OSError as error:
            raise self._write_error(error, "was removed or replaced, and could not be written again") from error
        if self.path == here:
            self._note(f"{here} was removed while it was written to: its {len(self):,} results are there again")
            return
        self._failed = OutputWriteError(
            f"{here} was replaced by another file meanwhile: its own {len(self):,} results are in {self.path}",
            kept=len(self),
        )
        raise self._failed

    def sync(self) -> None:
        try:
            self._finish_append()
            self._restore_name()
            self._syncing.end()
        except OutputWriteError:
            raise
        except OSError as error:
            raise self._write_error(error, "could not be forced onto the disk") from error

    def close(self, *, remove: bool = False) -> None:
        """Appended results stay. ``remove`` deletes the file. An empty file that was created here is deleted anyway."""
        if self._descriptor < 0:
            return
        try:
            if self._failed is None:
                self.sync()
        finally:
            with contextlib.suppress(OSError):
                self._syncing.end()
            with contextlib.suppress(OSError):
                unused = self._created and not self._begun and self.empty
                if (remove or unused) and has_name(self._descriptor, self.path):
                    os.unlink(self.path)
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.close(descriptor)
            except OSError as error:  # some network file systems notice only now that there was no space
                raise self._write_error(error, "could not be forced onto the disk") from error


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True
