"""A file of prompts, as numbered records that are read from the disk when they are needed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np

from ...errors import InputFileError
from ...notices import warn_user
from . import table_inputs
from .formats import TABLES, TEXT, format_of
from .lines import Lines, ShortRead, find_lines, read_at
from .paths import reason
from .text_inputs import text_lines
from .windows import RECORD_COST, PromptOf, cut, fingerprints, sharing_order

WINDOW_BYTES = 256 << 20

_COPIED_AT_ONCE = 1 << 20  # bytes of an input that cannot be read twice
_FIRST_BYTES = {  # of files that are not text
    b"\x1f\x8b": ("is compressed (gzip)", "`zcat {path} | hf-batchllm run - OUT ...`, or unpack it"),
    b"\x28\xb5\x2f\xfd": ("is compressed (zstd)", "`zstdcat {path} | hf-batchllm run - OUT ...`, or unpack it"),
    b"BZh": ("is compressed (bzip2)", "`bzcat {path} | hf-batchllm run - OUT ...`, or unpack it"),
    b"PK\x03\x04": ("is a zip archive or a spreadsheet", "unpack it, or export it as CSV"),
    b"\xff\xfe": ("is UTF-16", "`iconv -f UTF-16 -t UTF-8 {path}` makes UTF-8 of it"),
    b"\xfe\xff": ("is UTF-16", "`iconv -f UTF-16 -t UTF-8 {path}` makes UTF-8 of it"),
    b"PAR1": ("is a Parquet file", "pass format `parquet`"),
}


def record_key(raw: bytes) -> str:
    """12 hex digits that name the content of a record."""
    return hashlib.blake2b(raw, digest_size=6).hexdigest()


def open_source(
    path: str | os.PathLike[str], format: str | None = None, *, note: Callable[[str], None] | None = None
) -> Source:
    """``format``: jsonl, csv, tsv, parquet or txt; by default the suffix says it. ``-`` is stdin (jsonl).

    A pipe, a table or plain text is copied into an unnamed temporary file as JSON lines, which are read by offsets.
    """
    path = os.path.expanduser(path)
    kind = format_of(path, format, InputFileError)
    try:
        with contextlib.ExitStack() as opened:
            stream = opened.enter_context(_open(path, note or warn_user))
            origin = os.fstat(stream.fileno())
            problems: dict[int, str] = {}
            if kind in (*TABLES, TEXT):
                stream, problems = _as_json_lines(stream, path, kind, opened)
            else:
                if not _can_be_read_again(stream):
                    stream = opened.enter_context(_copied(stream, path))
                _check_text(stream, path)
            lines = find_lines(stream.fileno(), digest=True)
            opened.pop_all()
            return Source(path, kind, stream, lines, problems, origin)
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


def _can_be_read_again(stream: IO[bytes]) -> bool:
    """An ordinary file, at its beginning."""
    return stat.S_ISREG(os.fstat(stream.fileno()).st_mode) and stream.tell() == 0


@contextlib.contextmanager
def _room_for_a_copy(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = tempfile.gettempdir()
        raise InputFileError(
            f"{path} cannot be copied to a temporary file in {where}: {reason(error)}. "
            "The environment variable TMPDIR names another folder"
        ) from error


def _copied(stream: IO[bytes], path: str) -> IO[bytes]:
    with _room_for_a_copy(path):
        copy = tempfile.TemporaryFile()  # noqa: SIM115 (the source closes it)
        while piece := stream.read(_COPIED_AT_ONCE):
            copy.write(piece)
        copy.flush()
        copy.seek(0)
    return copy


def _as_json_lines(
    stream: IO[bytes], path: str, kind: str, opened: contextlib.ExitStack
) -> tuple[IO[bytes], dict[int, str]]:
    if kind == "parquet":
        if not _can_be_read_again(stream):
            stream = opened.enter_context(_copied(stream, path))
        rows = table_inputs.parquet_rows(stream, path)
    elif kind == TEXT:
        rows = text_lines(stream, path)
    else:
        rows = table_inputs.csv_rows(stream, path, "\t" if kind == "tsv" else ",")
    with _room_for_a_copy(path):
        copy = opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (the source closes it)
    problems: dict[int, str] = {}
    number = -1
    for line, problem in rows:
        number += bool(line)  # a blank line is no record
        if problem:
            problems[number] = problem
        with _room_for_a_copy(path):
            copy.write(line + b"\n")
    with _room_for_a_copy(path):
        copy.flush()
    return copy, problems


def _check_text(stream: IO[bytes], path: str) -> None:
    head = read_at(stream.fileno(), 1 << 12, 0)
    for first_bytes, (what, remedy) in _FIRST_BYTES.items():
        if head.startswith(first_bytes):
            raise InputFileError(f"{path} {what}: {remedy.format(path=path)}")
    first, newline, rest = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    first = first.strip()
    if (first.startswith((b"[{", b"[ {")) and not _is_json_before_more(first, rest)) or (first == b"[" and newline):
        raise InputFileError(
            f"{path} is one JSON array, not JSON lines (one object on each line): "
            f"`jq -c '.[]' {path} > lines.jsonl` makes lines of it"
        )
    if first == b"{" and rest.strip():
        raise InputFileError(
            f"{path} has objects over several lines, not JSON lines (one object on each line): "
            f"`jq -c . {path} > lines.jsonl` makes lines of it"
        )


def _is_json_before_more(first: bytes, rest: bytes) -> bool:
    """Whether the first line is a whole JSON array, and objects follow: one bad line in a file of JSON lines."""
    try:
        json.loads(first)
    except ValueError:
        return False
    return rest.lstrip().startswith(b"{")


class Source:
    """Records are numbered from 0. ``problems``: rows that are no valid records, and why; their bytes are JSON."""

    def __init__(
        self,
        path: str,
        format: str,
        stream: IO[bytes],  # of JSON lines
        lines: Lines,
        problems: dict[int, str],
        origin: os.stat_result,  # what was opened, where the stream is a copy
    ) -> None:
        self.path = path
        self.format = format
        self.problems = problems
        self._stream = stream
        self._lines = lines
        self._seen = os.fstat(stream.fileno())
        self._origin = origin

    @property
    def count(self) -> int:
        return len(self._lines)

    @property
    def size(self) -> int:
        return self._lines.end

    @property
    def digest(self) -> str:
        """A checksum of all bytes: the same only if the input has not changed."""
        return self._lines.digest

    @property
    def name(self) -> str:
        return "stdin" if self.path == "-" else self.path

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

    def where(self, number: int) -> str:
        """The place as a person finds it: ``line 17`` of the file, or ``row 17`` below the header of a table."""
        return f"row {number + 1:,}" if self.format in TABLES else f"line {self._lines.line(number):,}"

    def records(self, numbers: Sequence[int] | np.ndarray) -> list[bytes]:
        """The raw JSON of these records, in the order asked for."""
        try:
            found = self._lines.read(numbers)
            now = os.fstat(self._stream.fileno())
        except ShortRead:
            raise InputFileError(f"{self.name} has become shorter while it was being read") from None
        except OSError as error:
            raise InputFileError(f"{self.name} cannot be read any more: {reason(error)}") from error
        if now.st_mtime_ns != self._seen.st_mtime_ns and now.st_size <= self._seen.st_size:  # longer: lines were added
            raise InputFileError(f"{self.name} has changed while it was being read")
        return found

    def chunks(self, numbers: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """``numbers`` (by default all) in their order, in pieces that fit into memory easily."""
        return self._lines.chunks(numbers)

    def windows(
        self,
        numbers: np.ndarray | None = None,
        window_bytes: int = WINDOW_BYTES,
        prompt_of: PromptOf | None = None,
    ) -> Iterator[np.ndarray]:
        """``numbers`` (by default all) in windows that fit into memory; prompts that begin alike share a window.

        ``prompt_of`` gives the text of a record's prompt; by default its raw bytes stand for it.
        """
        numbers = np.arange(self.count) if numbers is None else np.asarray(numbers, dtype=np.int64)
        cost = self._lines.sizes[numbers].astype(np.int64) + RECORD_COST
        if int(cost.sum()) <= window_bytes:
            if len(numbers):
                yield numbers
            return
        raws = (raw for chunk in self.chunks(numbers) for raw in self.records(chunk))
        order, shared = sharing_order(fingerprints(raws, prompt_of))
        for window in cut(order, shared, cost[order], window_bytes):
            yield numbers[window]

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
