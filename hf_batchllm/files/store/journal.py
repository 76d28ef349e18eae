"""A file of results, one JSON object a line, that is only ever appended to by whole lines.

Killed at any moment it holds what was finished, and at most half a line at its end, which the next run cuts off. After
a power cut there may be zeros where the last lines were, too.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...errors import OutputBusyError, OutputFileError, OutputWriteError
from .lines import Lines, ShortRead, find_lines
from .locks import has_name, lock
from .paths import reason, replacing, write_all
from .syncing import Syncing

# What a line says of itself: (index, key, whether it is an error); None: it is not ours.
Identify = Callable[[dict[str, Any]], "tuple[int, str, bool] | None"]

_KEY = re.compile(r"[0-9a-f]{12}")
_BATCH_ID = re.compile(r"batch_req_(\d+)_([0-9a-f]{12})")
_HIGHEST = 1 << 48  # of an index
_TODO = {
    errno.ENOSPC: "Make room there, and the",
    errno.EDQUOT: "Make room there, and the",
    errno.EFBIG: "Raise the limit, and the",
}
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def identify(record: dict[str, Any]) -> tuple[int, str, bool] | None:
    """Plain records, and those of OpenAI's batches."""
    index, key = record.get("index"), record.get("key")
    if type(index) is int and 0 <= index < _HIGHEST and isinstance(key, str) and _KEY.fullmatch(key):
        return index, key, record.get("error") is not None
    name = record.get("id")
    if isinstance(name, str) and "custom_id" in record and (found := _BATCH_ID.fullmatch(name)):
        response = record.get("response")
        status = response.get("status_code") if isinstance(response, dict) else None
        return min(int(found[1]), _HIGHEST), found[2], record.get("error") is not None or status != 200
    return None


class Journal:
    """Open and locked from the beginning; nothing is changed before ``repair``."""

    def __init__(
        self,
        path: str,  # no link
        *,
        fsync: str | float = "5s",
        identify: Identify = identify,
        note: Callable[[str], None],
        busy: Callable[[], str],  # what is said when another process writes to it
    ) -> None:
        self.path = path
        self._identify = identify
        self._note = note
        self._busy = busy
        self._indices, self._starts, self._sizes = array("q"), array("q"), array("q")  # of each line that counts
        self._keys, self._bad = array("Q"), bytearray()
        self._state = 0, 0  # how many lines of those count, and where the last of them ends
        self._pending: list[tuple[int, int]] = []  # (index, bytes) of what is being appended
        self._repairs: list[str] = []
        self._drops = False  # lines are to go that stand before others
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

    # What is there already

    def scan(self) -> None:
        """Reads what is done, and finds what has to be repaired. OutputFileError for what is not ours."""
        self._scanned = True
        lines = find_lines(self._descriptor)
        last = len(lines) - 1
        for chunk in lines.chunks():
            for number, raw in zip(chunk.tolist(), lines.read(chunk), strict=True):
                whole = number < last or lines.ended
                named = self._named(raw) if whole else None
                if named is None:
                    self._odd_line(lines, number, raw, whole)
                    continue
                self._indices.append(named[0])
                self._keys.append(int(named[1], 16))
                self._bad.append(named[2])
                self._starts.append(int(lines.starts[number]))
                self._sizes.append(int(lines.sizes[number]) + 1)
        end = self._starts[-1] + self._sizes[-1] if self._starts else 0
        self._state = len(self._indices), end
        self._drops |= sum(self._sizes) < end  # blank lines, and those found to be damaged
        again = self._again()
        if len(again):
            self._repairs.append(f"{len(again):,} results were there twice, and are dropped")
            self._drops = True
            self._keep(np.setdiff1d(np.arange(len(self)), again))

    def _again(self) -> np.ndarray:
        """Places of results whose record has one before them."""
        order = np.argsort(self.indices, kind="stable")
        indices = self.indices[order]
        return order[1:][indices[1:] == indices[:-1]]

    def _named(self, raw: bytes) -> tuple[int, str, bool] | None:
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        return self._identify(record) if isinstance(record, dict) else None

    def _odd_line(self, lines: Lines, number: int, raw: bytes, whole: bool) -> None:
        if b"\0" in raw:  # in no JSON: what a file system leaves where it did not come to write
            self._repairs.append(f"line {lines.line(number):,} was damaged by a crash of the system, and is dropped")
        elif number == len(lines) - 1 and not (whole and _is_json(raw)):
            self._repairs.append("half a line at its end is cut off")
        else:
            raise OutputFileError(
                f"{self.path}, line {lines.line(number):,}: this is not a result of such a run. Nothing was changed. "
                "Take the line out, or give another output, or begin afresh with `--restart`"
            )

    def __len__(self) -> int:
        """Results."""
        return len(self._indices)

    @property
    def empty(self) -> bool:
        """Not even half a line."""
        return os.fstat(self._descriptor).st_size == 0

    @property
    def indices(self) -> np.ndarray:
        return np.array(self._indices, dtype=np.int64)

    @property
    def errors(self) -> np.ndarray:
        """The numbers of the records whose result is an error."""
        return np.sort(self.indices[np.frombuffer(bytes(self._bad), dtype=bool)])

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """([results] the numbers of the records, ascending; their keys, as 48-bit numbers). Until ``repair``."""
        indices, keys = self.indices, np.array(self._keys, dtype=np.uint64)
        order = np.argsort(indices, kind="stable")
        return indices[order], keys[order]

    # Changes

    def repair(self, *, drop_errors: bool = False) -> None:
        """Cuts off half a line, takes out what ``scan`` found, and errors (to be run again) if asked to."""
        self._begun = True
        del self._keys[:]
        try:
            if self._scanned and os.fstat(self._descriptor).st_size > self._state[1]:
                os.ftruncate(self._descriptor, self._state[1])
            drop_errors = drop_errors and any(self._bad)
            if self._drops or drop_errors:
                bad = np.frombuffer(bytes(self._bad), dtype=bool)
                self._rewrite(np.flatnonzero(~bad) if drop_errors else np.arange(len(self)))
                self._drops = False
        except OSError as error:
            raise self._write_error(error, "could not be repaired") from error
        if self._repairs:
            shown = self._repairs[:5] + [f"and {len(self._repairs) - 5:,} more"] * (len(self._repairs) > 5)
            self._note(f"{self.path}: {'; '.join(shown)} (what is missing runs again)")
            self._repairs = []

    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        """(index, JSON without a newline) for each: all of them, or those for which there was space."""
        if self._failed is not None:
            raise self._failed
        if self._pending:
            self._settle()
        data = b"".join([part for _, line in lines for part in (line, b"\n")])
        if data.count(b"\n") != len(lines):
            raise ValueError("a result must be one line of JSON")
        self._pending = [(index, len(line) + 1) for index, line in lines]
        try:
            write_all(self._descriptor, data)
            self._settle(known=len(data))
            self._syncing.written()
        except OSError as error:
            raise self._write_error(error, "could not be written") from error

    def _settle(self, known: int | None = None) -> None:
        """Takes down what has been written. It may have been broken off anywhere, here too: ``_state`` says how far
        the arrays hold, and a part of a line goes."""
        count, end = self._state
        self._shorten(count)
        size = end + known if known is not None else os.fstat(self._descriptor).st_size
        for index, length in self._pending:
            if end + length > size:
                os.ftruncate(self._descriptor, end)
                break
            self._indices.append(index)
            self._starts.append(end)
            self._sizes.append(length)
            self._bad.append(False)
            end += length
        self._state = len(self._indices), end
        self._pending = []

    def _shorten(self, count: int) -> None:
        for each in (self._indices, self._starts, self._sizes, self._bad):
            del each[count:]

    def _write_error(self, error: OSError, what: str) -> OutputWriteError:
        with contextlib.suppress(OSError):  # else the next run does it
            self._settle()
        todo = _TODO.get(error.errno or 0, "The")
        self._failed = OutputWriteError(
            f"{self.path} {what}: {reason(error)}. {len(self):,} results are kept. {todo} same command goes on",
            kept=len(self),
            number=error.errno,
        )
        return self._failed

    def _keep(self, places: np.ndarray) -> None:
        for each in (self._indices, self._starts, self._sizes, self._keys):
            if len(each):
                kept = np.frombuffer(each, dtype=each.typecode)[places]
                del each[:]
                each.frombytes(kept.tobytes())
        self._bad = bytearray(np.frombuffer(bytes(self._bad), dtype=np.uint8)[places].tobytes())
        self._state = len(places), self._state[1]

    def _rewrite(self, places: np.ndarray) -> None:
        """The lines at these places, in this order, in a new file that takes the name when all of them are in it."""
        self._syncing.end()
        try:
            with replacing(self.path) as descriptor:
                lock(descriptor, self.path)  # before it can be found by its name
                sizes = array("q")
                for lines in self._read(places):
                    sizes.extend(len(line) + 1 for line in lines)
                    write_all(descriptor, b"\n".join([*lines, b""]))
        except BaseException:
            if not has_name(self._descriptor, self.path):  # interrupted behind the exchange: this one is nobody's now
                self._failed = OutputWriteError(f"{self.path} was interrupted while it was rewritten", len(places))
            raise
        old, self._descriptor = self._descriptor, descriptor
        os.close(old)
        self._keep(places)
        ends = np.cumsum(np.array(sizes, dtype=np.int64))
        self._sizes, self._starts = sizes, array("q", (ends - np.array(sizes, dtype=np.int64)).tobytes())
        self._state = len(places), int(ends[-1]) if len(ends) else 0
        self._syncing.begin(descriptor)

    def _read(self, places: np.ndarray) -> Iterator[list[bytes]]:
        """The lines at these places, as many at a time as are comfortably held."""
        starts, sizes = np.array(self._starts, dtype=np.int64), np.array(self._sizes, dtype=np.int64) - 1
        lines = Lines(self._descriptor, starts, sizes, np.zeros(0, dtype=np.int64), self._state[1], True)
        for chunk in lines.chunks(places):
            try:
                yield lines.read(chunk)
            except ShortRead:
                raise OSError(errno.EIO, "the file has become shorter") from None

    # At the end

    def put_in_order(self) -> None:
        """By the numbers of the records. Where there is no space for it the lines stay as they came."""
        self._finish_append()
        self._hold_name()
        order = np.argsort(self.indices, kind="stable")
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
        order = np.argsort(self.indices, kind="stable")
        for lines in self._read(order):
            yield from lines

    def _finish_append(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._pending:
            self._settle()

    def _hold_name(self) -> None:
        """Results are to be found under their name also when somebody has removed or replaced the file meanwhile."""
        if not self._begun or has_name(self._descriptor, self.path):
            return
        here, number = self.path, 1
        if os.path.lexists(here):  # another run's, for all we know
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
            self._hold_name()
            self._syncing.end()
        except OutputWriteError:
            raise
        except OSError as error:
            raise self._write_error(error, "could not be brought to the disk") from error

    def close(self, *, remove: bool = False) -> None:
        """What was appended stays; ``remove``: the file goes, as it does when there was none and nothing was done."""
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
            except OSError as error:  # some network file systems say only now that there was no space
                raise self._write_error(error, "could not be brought to the disk") from error


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True
