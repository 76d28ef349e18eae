"""A file of prompts, as numbered records that are read from the disk when they are needed."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import stat
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import IO, Any
from zlib import crc32

import numpy as np

from ..errors import InputFileError
from ..notices import warn_user
from .paths import reason
from .tables import MARK, TABLES, format_of, rows_of

WINDOW_BYTES = 256 << 20
LEVELS = (64, 256, 1024, 4096, 16384)  # first bytes of a prompt, each with a checksum
_RECORD_COST = 512  # bytes of memory that a record takes beside its text
_COPIED_AT_ONCE = 1 << 20  # bytes of an input that cannot be read twice

PromptOf = Callable[[bytes], "bytes | str | None"]  # a record -> the text of its prompt


def record_key(raw: bytes) -> str:
    """12 hex digits that name the content of a record."""
    return hashlib.blake2b(raw, digest_size=6).hexdigest()


def open_source(
    path: str | os.PathLike[str], format: str | None = None, *, note: Callable[[str], None] = warn_user
) -> Source:
    """``format``: jsonl, csv, tsv, parquet or txt; by default the suffix says it. ``-`` is stdin (jsonl).

    A pipe, a table or plain text is copied into an unnamed temporary file as JSON lines, which are read by offsets.
    """
    path = os.path.expanduser(path)
    kind = format_of(path, format, InputFileError)
    try:
        with contextlib.ExitStack() as opened:
            stream = opened.enter_context(_open(path, note))
            origin = os.fstat(stream.fileno())
            twice = stat.S_ISREG(origin.st_mode) and stream.tell() == 0  # it can be read a second time
            if not twice and kind in ("jsonl", "parquet"):
                pieces = iter(lambda: stream.read(_COPIED_AT_ONCE), b"")
                stream = opened.enter_context(_copied(pieces, path))
            if kind != "jsonl":
                stream = opened.enter_context(_copied((row + b"\n" for row in rows_of(stream, path, kind)), path))
            source = Source(path, kind, stream, origin)
            opened.pop_all()
            return source
    except OSError as error:
        name = "stdin" if path == "-" else path
        raise InputFileError(f"{name} cannot be read: {reason(error)}") from error


def _open(path: str, note: Callable[[str], None]) -> IO[bytes]:
    if path != "-":
        if os.path.isdir(path):
            raise InputFileError(f"{path} is a folder, not a file")
        return open(path, "rb")
    if os.isatty(0):
        note("reading JSON lines from the terminal: end them with Ctrl-D")
    return os.fdopen(os.dup(0), "rb")


def _copied(pieces: Iterable[bytes], path: str) -> IO[bytes]:
    try:
        copy = tempfile.TemporaryFile()  # noqa: SIM115 (the source closes it)
        copy.writelines(pieces)
        copy.seek(0)
    except OSError as error:
        raise InputFileError(
            f"{path} cannot be copied to a temporary file in {tempfile.gettempdir()}: {reason(error)}. "
            "The environment variable TMPDIR names another folder"
        ) from error
    return copy


class Source:
    """Its records are the lines that are not blank, numbered from 0."""

    def __init__(
        self,
        path: str,
        format: str,
        stream: IO[bytes],  # of JSON lines, at its beginning
        origin: os.stat_result,  # what was opened, where the stream is a copy
    ) -> None:
        self.path, self.format = path, format
        self.name = "stdin" if path == "-" else path
        self._stream, self._origin = stream, origin
        starts, sizes, blanks, keys = array("q"), array("q"), array("q"), array("Q")
        digest = hashlib.blake2b(digest_size=16)
        at = 0
        for place, raw in enumerate(stream):
            digest.update(raw)
            line = raw if at else raw.removeprefix(MARK)
            if line.isspace() or not line:
                blanks.append(place)
            else:
                starts.append(at + len(raw) - len(line))
                record = line.removesuffix(b"\n").removesuffix(b"\r")
                sizes.append(len(record))
                keys.append(int(record_key(record), 16))
            at += len(raw)
        self._starts, self._sizes = np.array(starts, dtype=np.int64), np.array(sizes, dtype=np.int64)
        self.keys = np.array(keys, dtype=np.uint64)  # [records] as 48-bit numbers
        self._before = np.array(blanks, dtype=np.int64) - np.arange(len(blanks))  # records before each blank line
        self.count, self.size = len(starts), at
        self.digest = digest.hexdigest()  # of all bytes: the same only if the input has not changed
        self._seen = os.fstat(stream.fileno())

    def is_file(self, there: str | int) -> bool:
        """Whether this name, or this descriptor, leads to the ordinary file that is read here."""
        try:
            return stat.S_ISREG(self._origin.st_mode) and os.path.samestat(self._origin, os.stat(there))
        except OSError:
            return False

    def summary(self) -> dict[str, Any]:
        """The input's entry in a run record."""
        path = self.path if self.path == "-" else os.path.abspath(self.path)
        return {"path": path, "records": self.count, "bytes": self.size, "digest": self.digest}

    def key(self, number: int) -> str:
        """What ``record_key`` makes of a record."""
        return f"{self.keys[number]:012x}"

    def where(self, number: int) -> str:
        """The place as a person finds it: ``line 17`` of the file, or ``row 17`` below the header of a table."""
        if self.format in TABLES:
            return f"row {number + 1:,}"
        return f"line {number + 1 + int(np.searchsorted(self._before, number, side='right')):,}"

    def read(self, numbers: Iterable[int] | np.ndarray | None = None) -> Iterator[tuple[int, bytes]]:
        """(a record's number, its raw JSON), in the order asked for; by default of all records."""
        try:
            for number in range(self.count) if numbers is None else numbers:
                self._stream.seek(int(self._starts[number]))
                raw = self._stream.read(int(self._sizes[number]))
                if len(raw) < self._sizes[number]:
                    raise InputFileError(f"{self.name} has become shorter while it was being read")
                yield int(number), raw
            now = os.fstat(self._stream.fileno())
        except OSError as error:
            raise InputFileError(f"{self.name} cannot be read any more: {reason(error)}") from error
        if now.st_mtime_ns != self._seen.st_mtime_ns and now.st_size <= self._seen.st_size:  # longer: lines were added
            raise InputFileError(f"{self.name} has changed while it was being read")

    def records(self, numbers: Sequence[int] | np.ndarray) -> list[bytes]:
        return [raw for _, raw in self.read(numbers)]

    def windows(
        self, numbers: np.ndarray, window_bytes: int = WINDOW_BYTES, prompt_of: PromptOf | None = None
    ) -> Iterator[np.ndarray]:
        """``numbers`` in windows that fit into memory; prompts that begin alike share a window, but at its edges.

        ``prompt_of`` gives the text of a record's prompt; by default its raw bytes stand for it.
        """
        cost = self._sizes[numbers] + _RECORD_COST
        if int(cost.sum()) <= window_bytes:
            yield from [numbers] if len(numbers) else []
            return
        order, _ = sharing_order(fingerprints((raw for _, raw in self.read(numbers)), prompt_of))
        for first, last in pairwise(cut(cost[order], math.ceil(cost.sum() / window_bytes)).tolist()):
            if last > first:
                yield numbers[np.sort(order[first:last])]

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- which records run together ----------------------------------------------------------------------------------------


def fingerprints(records: Iterable[bytes], prompt_of: PromptOf | None = None) -> np.ndarray:
    """[records, levels]: checksums of the beginnings of each prompt. Two that are equal by chance do little harm."""
    prints = array("I")
    extend = prints.extend
    first, *further = LEVELS
    for raw in records:
        text = raw if prompt_of is None else prompt_of(raw) or b""
        if isinstance(text, str):
            text = text[: LEVELS[-1]].encode("utf-8", "surrogatepass")
        row = [crc32(text[:first])]
        at = first
        for level in further:
            row.append(crc32(text[at:level], row[-1]) if len(text) > at else row[-1])
            at = level
        extend(row)
    return np.frombuffer(prints, dtype=np.uint32).reshape(-1, len(LEVELS))


def sharing_order(prints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[records] an order in which records that begin alike are neighbours, otherwise as in the file;
    [records] how many levels each one shares with the one before it."""
    seats: list[np.ndarray] = []  # for each level: [records] the first record that begins so
    for level in prints.T:
        _, first, alike = np.unique(level, return_index=True, return_inverse=True)
        seats.append(first[alike])
    order = np.lexsort(seats[::-1])
    same = np.array([seat[order][1:] == seat[order][:-1] for seat in seats])
    shared = np.logical_and.accumulate(same).sum(axis=0)
    return order, np.concatenate([np.zeros(min(len(order), 1), dtype=np.int64), shared])


def cut(cost: np.ndarray, pieces: int) -> np.ndarray:
    """[pieces + 1] where each piece begins, if a list is cut into pieces of about equal cost.

    Records that share a beginning may be divided: what they share is then computed once more, which is little beside a
    piece. ``cost``: [records]
    """
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(cost)])  # [records + 1]
    edges: np.ndarray = np.searchsorted(before, before[-1] * np.arange(pieces + 1) // pieces)
    return edges
