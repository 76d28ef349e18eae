"""The journal of an output: whole lines of JSON are appended, and the last line of a record counts.

A process that is killed leaves whole lines and at most half a line. A power cut may leave zeros in place of the last
lines. The next run reads which records have a result, and drops such a tail. At the end the lines that count are
written once more in the input's order, to a file beside this one, which then takes its name.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np

from ..errors import OutputBusyError, OutputFileError, OutputWriteError
from .paths import reason, replacing, sync_file

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SYNC_EVERY = 5.0  # seconds: results are forced onto the disk with the first one that comes after these
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
_LOCKED_BY_ANOTHER = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_MARK = b"\xef\xbb\xbf"  # some editors write it before UTF-8
_KEY = re.compile(r"[0-9a-f]{12}")
_BATCH_ID = re.compile(r"batch_req_(\d+)_([0-9a-f]{12})")  # as ``openai.py`` writes it
_HIGHEST = 1 << 48


def identify(result: Any) -> tuple[int, str, bool] | None:
    """The number of the record that a result answers, the record's key, and whether the result is an error.

    It knows plain results and responses as in OpenAI's batches; anything else gives None.
    """
    if not isinstance(result, dict):
        return None
    index, key = result.get("index"), result.get("key")
    if type(index) is int and 0 <= index < _HIGHEST and isinstance(key, str) and _KEY.fullmatch(key):
        return index, key, result.get("error") is not None
    name = result.get("id")
    if isinstance(name, str) and "custom_id" in result and (found := _BATCH_ID.fullmatch(name)):
        response = result.get("response")
        status = response.get("status_code") if isinstance(response, dict) else None
        return min(int(found[1]), _HIGHEST), found[2], result.get("error") is not None or status != 200
    return None


def lock(descriptor: int, path: str, note: Callable[[str], None] = lambda message: None) -> bool:
    """False: another process holds it. The lock ends with the descriptor, so also when the process is killed."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError as error:
        if error.errno in _LOCKED_BY_ANOTHER:
            return False
    note(f"{path} cannot be locked, as its file system has no locks: make sure that no second run writes to it")
    return True


class Journal:
    """It is open and locked from the beginning. Nothing is changed before ``prepare``.

    path: no link. count: the records of the input; each array has an entry for each of them.
    start: [records] where the line of each one's result begins; -1: it has none. size: [records] its bytes, with the
    newline. key: [records] as 48-bit numbers. is_error: [records] whether the result is an error. Both are those of
    earlier runs.
    """

    def __init__(
        self,
        path: str,
        count: int,
        *,
        busy: Callable[[], str],  # the error when another process writes to it
        note: Callable[[str], None],
    ) -> None:
        self.path = path
        self.start, self.size = np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.int64)
        self.key, self.is_error = np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=bool)
        self.beyond: dict[int, bool] = {}  # records that the input does not have: whether their result is an error
        self._busy, self._note = busy, note
        self._repairs: list[str] = []
        self._end = 0  # where the last whole line ends
        self._scanned = False
        self._failed: BaseException | None = None
        self._synced, self._fresh = time.monotonic(), False  # when that was; whether something was appended since
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        while True:
            self.created = not os.path.lexists(self.path)
            file = io.FileIO(os.open(self.path, _FLAGS, 0o666), "r+")
            try:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OutputFileError(f"{self.path} is no ordinary file")
                if not lock(file.fileno(), self.path, self._note):
                    raise OutputBusyError(self._busy())
                if self._is_here(file):  # a run that ended in between may have put another file there
                    return file
            except BaseException:
                file.close()
                raise
            file.close()

    @property
    def has_name(self) -> bool:
        """Whether the file of this name is the one that is written to."""
        return self._is_here(self._file)

    def _is_here(self, file: IO[bytes]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False

    # Results of earlier runs

    def scan(self) -> None:
        """Reads which results are there. OutputFileError for a line that no such run has written."""
        at, end, damaged, self._scanned = 0, self.file_size, [], True
        self._file.seek(0)
        for place, raw in enumerate(open(self._file.fileno(), "rb", closefd=False), 1):  # noqa: SIM115
            begin, at = at, at + len(raw)
            line = raw if begin else raw.removeprefix(_MARK)
            result = _parsed(line) if raw.endswith(b"\n") else None
            found = identify(result)
            if found is not None:
                number, key, is_error = found
                self._end = at
                if number >= len(self.start):
                    self.beyond[number] = is_error
                    continue
                self.start[number], self.size[number] = at - len(line), len(line)
                self.key[number], self.is_error[number] = int(key, 16), is_error
            elif b"\0" in raw:  # in no JSON: a file system leaves zeros where it did not get to write
                damaged.append(place)
            elif at == end and result is None and raw.strip():
                self._repairs.append("half a line at its end is cut off")
            elif raw.strip():
                raise OutputFileError(
                    f"{self.path}, line {place:,}: this is not a result of such a run. Nothing was changed. "
                    "Take the line out, give another output, or begin afresh with `--restart`"
                )
        if damaged:
            many = f"line {damaged[0]:,}{f' and {len(damaged) - 1:,} more' if damaged[1:] else ''}"
            self._repairs.append(f"{many} damaged by a crash of the system, dropped")

    def __len__(self) -> int:
        """How many records have a result."""
        return int(np.count_nonzero(self.start >= 0))

    @property
    def file_size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    # Changes

    def prepare(self) -> None:
        """Cuts off what ``scan`` found behind the last result."""
        try:
            if self._scanned and self.file_size > self._end:
                self._file.truncate(self._end)
        except OSError as error:
            raise self._write_error(error, "could not be repaired") from error
        if self._repairs:
            self._note(f"{self.path}: {'; '.join(self._repairs)} (records without a result run again)")
            self._repairs = []

    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        """Each is (the record's number, JSON without a newline). A full disk keeps those that fitted whole."""
        if self._failed is not None:
            raise self._failed
        data = b"".join([part for _, line in lines for part in (line, b"\n")])
        if data.count(b"\n") != len(lines):
            raise ValueError("a result must be one line of JSON")
        written, self._fresh = 0, True
        try:
            while written < len(data):
                written += os.write(self._file.fileno(), memoryview(data)[written:])
        except BaseException as error:  # an interrupt, too, may come behind half a line
            self._failed = error
        for number, line in lines:
            size = len(line) + 1
            if size > written:
                break
            self.start[number], self.size[number], self.is_error[number] = self._end, size, False
            self._end += size
            written -= size
        if self._failed is not None:
            with contextlib.suppress(OSError):  # the next run does it then
                self._file.truncate(self._end)
            if isinstance(self._failed, OSError):
                raise self._write_error(self._failed, "could not be written")
        self.sync(within=SYNC_EVERY)

    def _write_error(self, error: OSError, what: str) -> OutputWriteError:
        kept = f"{len(self):,} results are kept, and the same command continues"
        self._failed = OutputWriteError(f"{self.path} {what}: {reason(error)}. {kept}", len(self), error.errno)
        return self._failed

    def sync(self, within: float = 0.0) -> None:
        """Brings everything to the disk, if that is longer ago than ``within`` seconds."""
        if self._failed is not None:
            raise self._failed
        if not self._fresh or time.monotonic() - self._synced < within:
            return
        try:
            sync_file(self._file.fileno())
        except OSError as error:
            raise self._write_error(error, "could not be forced onto the disk") from error
        self._synced, self._fresh = time.monotonic(), False

    # At the end

    def compact(self) -> None:
        """Leaves nothing but the lines that count, in the input's order."""
        self.sync()
        places = self._places()
        sizes = self.size[places]
        begins = np.cumsum(sizes) - sizes
        in_place = self.has_name
        if in_place and np.array_equal(self.start[places], begins) and int(sizes.sum()) == self.file_size:
            return
        here, replaced = self.path, os.path.lexists(self.path) and not in_place
        if replaced:  # by another file, which stays
            names = (f"{here}.rescued", *(f"{here}.rescued-{number}" for number in range(2, 10**6)))
            self.path = next(name for name in names if not os.path.lexists(name))
        try:
            with replacing(self.path) as file:
                lock(file.fileno(), self.path)  # before it has its name, so that no other run can lock it first
                file.writelines(line + b"\n" for _, line in self.items(places))
        except OSError as error:
            raise self._write_error(error, "could not be put in the order of the input") from error
        self._file.close()
        self._file, self.start[places], self._end = file, begins, int(sizes.sum())
        if replaced:
            said = f"{here} was replaced by another file meanwhile: its own {len(self):,} results are in {self.path}"
            raise OutputWriteError(said, kept=len(self))

    def _places(self) -> np.ndarray:
        """The numbers of the records that have a result."""
        return np.flatnonzero(self.start >= 0)

    def items(self, numbers: np.ndarray | None = None) -> Iterator[tuple[int, bytes]]:
        """(a record's number, its line without the newline), for these records or for all that have a result."""
        numbers = self._places() if numbers is None else numbers
        for number, start, size in zip(numbers.tolist(), self.start[numbers], self.size[numbers], strict=True):
            self._file.seek(int(start))
            line = self._file.read(int(size))
            if len(line) < size:
                raise OutputFileError(f"{self.path} has become shorter while it was being read")
            yield number, line.rstrip(b"\r\n")

    def close(self, *, keep: bool = False) -> None:
        """Appended results stay. ``keep`` leaves a file that was made here, though empty."""
        if self._file.closed:
            return
        try:
            if self._failed is None:
                self.sync()
        finally:
            with contextlib.suppress(OSError):
                if self.created and not keep and not self.file_size and self.has_name:
                    os.unlink(self.path)
            self._file.close()


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
