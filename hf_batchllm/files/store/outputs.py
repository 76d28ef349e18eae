"""Where results go: a file that a later run can go on with, or a stream.

Beside ``out.jsonl`` stands its run record, ``out.jsonl.run.json``. A table (CSV, Parquet) is written at the end, from a
journal ``out.csv.part.jsonl`` that goes when the table is there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import FilesError, OutputFileError, OutputWriteError, RunChangedError
from ...notices import warn_user
from .journal import Identify, Journal, identify
from .paths import real_path, reason, replacing, sync_folder, temporary_beside, write_atomically
from .run_record import RunRecord, record_path
from .sources import TABLES, Source, format_of, record_key
from .streams import Output, StreamOutput, is_stream
from .syncing import seconds_of
from .table_outputs import write_csv, write_parquet
from .tables import import_pyarrow

AFRESH = "`--restart` begins afresh (what is there is moved to {path}.bak-1 or the next free number, never deleted)"

ORDERS = ("input", "finished")


def open_output(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    source: Source | None = None,
    fsync: str | float = "5s",
    restart: bool = False,
    identify: Identify = identify,
    note: Callable[[str], None] | None = None,
) -> Output:
    """Locks the output and reads what is in it. Nothing is changed before ``begin``.

    ``format``: jsonl, csv, tsv or parquet; else the suffix says. ``-`` is stdout; that, and whatever is no ordinary
    file, takes JSON lines and cannot be gone on with. ``source`` must be another file. ``fsync``: always, never, or how
    often (``5s``). ``note`` is called with what a person should hear (without it: a warning).
    """
    path = os.fspath(path)
    note = note or warn_user
    seconds_of(fsync)
    if is_stream(path):
        if format not in (None, "jsonl"):
            raise OutputFileError(f"{path} is a stream and takes JSON lines: a {format} file needs a name of its own")
        return StreamOutput(path, source)
    kind = format_of(path, format, OutputFileError)
    if kind == "parquet":
        import_pyarrow()
    return FileOutput(path, kind, source, fsync, restart, identify, note)


class FileOutput(Output):
    streams = False

    def __init__(
        self,
        path: str,
        kind: str,
        source: Source | None,
        fsync: str | float,
        restart: bool,
        identify: Identify,
        note: Callable[[str], None],
    ) -> None:
        self.path = real_path(path)
        self.format = kind
        self._table = kind in TABLES
        self._record_path = record_path(self.path)
        self._journal_path = f"{self.path}.part.jsonl" if self._table else self.path
        self._restart = restart
        self._note = note
        self._record: RunRecord | None = None
        self._same = False  # the record stays as it is
        self._ended = False
        self._check_place(source)
        self._make_journal = lambda: Journal(
            self._journal_path, fsync=fsync, identify=identify, note=note, busy=self._busy
        )
        try:
            self._journal = self._make_journal()
        except OSError as error:
            raise OutputFileError(f"{self.path} cannot be written to: {reason(error)}") from error
        try:
            if not restart:
                self._look()
        except OSError as error:
            self._journal.close()
            raise OutputFileError(f"{self.path} cannot be read: {reason(error)}") from error
        except BaseException:
            self._journal.close()
            raise

    # Before anything is changed

    def _check_place(self, source: Source | None) -> None:
        if os.path.isdir(self.path):
            raise OutputFileError(f"{self.path} is a folder: give the name of a file in it")
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder):
            raise OutputFileError(f"{self.path} cannot be written: there is no folder {folder}")
        if source is not None and any(
            map(source.is_file, (self.path, self._journal_path, self._record_path, temporary_beside(self.path)))
        ):
            raise OutputFileError(f"{source.name} is the input, and would be written to: give another output")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OutputFileError(
                f"{folder} cannot be written to (read-only, or permission denied): the results and their run record "
                "are made there"
            )
        for file in (self._journal_path, self._record_path, self.path):
            if os.path.exists(file) and not os.access(file, os.W_OK):
                raise OutputFileError(f"{file} cannot be written to: it is read-only")

    def _busy(self) -> str:
        who = ""
        with contextlib.suppress(FilesError):
            record = RunRecord.read(self._record_path)
            if record is not None and record.process:
                known = record.process
                who = f" (process {known.get('pid')} on {known.get('host')}, since {known.get('since')})"
        return f"another run{who} is writing to {self.path}: wait for it, or give another output"

    def _look(self) -> None:
        self._journal.scan()
        self._record = RunRecord.read(self._record_path)
        begun = not self._journal.empty
        afresh = AFRESH.format(path=self.path)
        if begun and self._record is None:
            raise OutputFileError(
                f"{self._journal_path} is not empty, and {self._record_path}, which would say how its results were "
                f"made, is not there: give another output, or {afresh}"
            )
        if self._table and not begun and os.path.exists(self.path) and os.path.getsize(self.path):
            if self._record is None or self._record.finished is None:
                raise OutputFileError(
                    f"{self.path} exists already, and is not what a run has written: give another output, or {afresh}"
                )
            self.complete = True
        if not len(self._journal) and not self.complete:
            self._record = None  # of a run that came to no result, or whose results are gone

    def __len__(self) -> int:
        if self.complete and self._record is not None:
            return self._record.results or 0
        return len(self._journal)

    @property
    def errors(self) -> np.ndarray:
        return self._journal.errors

    # A run

    def begin(
        self, record: RunRecord, source: Source, *, limit: int | None = None, retry_errors: bool = False
    ) -> RunRecord:
        self._count = source.count if limit is None else min(limit, source.count)
        old = self._record
        if old is not None:
            self._compare(old, record, source, retry_errors)
        if self.complete:
            if retry_errors:
                raise OutputFileError(
                    f"{self.path} is complete, and single rows of a table cannot be run again: "
                    f"write to a .jsonl file for that, or {AFRESH.format(path=self.path)}"
                )
            assert old is not None
            return old
        if self._restart:
            self._move_away()
        new = record.begin(old, source.summary())
        if old is not None and old.version != new.version:
            self._note(
                f"{self.path} was begun with version {old.version} of the library, and goes on with {new.version}: "
                "single tokens may come out otherwise than they would have"
            )
        with contextlib.suppress(OSError):
            os.unlink(temporary_beside(self.path))  # of a run that was killed
        self._same = old is not None and bool(old.finished) and not len(self.missing())
        if old is not None and self._same and not (retry_errors and len(self.errors)):
            self._record = old  # nothing is to be done: it goes on to say how everything was
        else:
            self._same = False
            self._record = new
            self._write_record()
        self._journal.repair(drop_errors=retry_errors)
        return self._record

    def _compare(self, old: RunRecord, record: RunRecord, source: Source, retry_errors: bool) -> None:
        differences = old.differences(record)
        afresh = f"give another output, or {AFRESH.format(path=self.path)}"
        if differences:
            raise RunChangedError(
                f"{self.path} was begun with other settings: {'; '.join(differences)}. "
                f"To go on, run it with the old ones; else {afresh}",
                differences,
            )
        if old.input.get("digest") == source.digest and source.digest:
            return
        if self.complete:
            was, now = int(old.input.get("records") or 0), source.count
            raise RunChangedError(
                f"{self.path} is complete, and {source.name} has changed since (it had {was:,} records, and has "
                f"{now:,}). A table cannot be gone on with (a .jsonl file can): {afresh}",
                [f"{source.name} has changed"],
            )
        self._compare_records(source, afresh, retry_errors)

    def _compare_records(self, source: Source, afresh: str, retry_errors: bool) -> None:
        numbers, keys = self._journal.keys()
        errors = np.isin(numbers, self.errors)
        if retry_errors:  # they are run again anyhow: whoever has corrected such a line is welcome
            numbers, keys = numbers[~errors], keys[~errors]
        if len(numbers) and numbers[-1] >= source.count:
            raise RunChangedError(
                f"{self.path} has {int(numbers[-1]) + 1:,} records or more to go by, and {source.name} has only "
                f"{source.count:,}: it is another input, or it was cut. Give the old input; else {afresh}",
                [f"{source.name} is shorter than it was"],
            )
        first = 0
        for chunk in source.chunks(numbers):
            found = np.array([int(record_key(raw), 16) for raw in source.records(chunk)], dtype=np.uint64)
            changed = np.flatnonzero(found != keys[first : first + len(chunk)]) + first
            first += len(chunk)
            if len(changed):
                where = source.where(int(numbers[changed[0]]))
                corrected = not retry_errors and bool(errors[changed].all())
                todo = "`--retry-errors` runs lines again that had errors" if corrected else "Give the old input"
                raise RunChangedError(
                    f"{source.name}, {where}: this record has changed since {self.path} was begun, which has "
                    f"{'an error' if corrected else 'a result'} for it. {todo} (lines may be added at its end); "
                    f"else {afresh}",
                    [f"{source.name}, {where} has changed"],
                )

    def _move_away(self) -> None:
        """Never deleted, and never over another. A copy of the record goes first and the journal last: killed in
        between, it is still the old run, which can be gone on with or moved away again."""
        there = [path for path in (self.path, self._journal_path) if os.path.exists(path) and os.path.getsize(path)]
        if not there:
            return
        record = _content(self._record_path)
        number = 1
        while any(os.path.lexists(f"{self.path}.bak-{number}{tail}") for tail in ("", ".part.jsonl")) or (
            _content(record_path(f"{self.path}.bak-{number}")) not in (None, record)
        ):
            number += 1
        aside = f"{self.path}.bak-{number}"
        try:
            if record is not None:
                write_atomically(record_path(aside), record, temporary_beside(self._record_path))
            if self._table and os.path.exists(self.path):
                os.rename(self.path, aside)
            if os.path.getsize(self._journal_path):
                os.rename(self._journal_path, f"{aside}.part.jsonl" if self._table else aside)
                self._journal.close()
                self._journal = self._make_journal()
            sync_folder(self.path)
        except OSError as error:
            raise OutputFileError(f"{self.path} cannot be moved to {aside}: {reason(error)}") from error
        self._note(f"what was in {self.path} is in {aside} now")

    def confirm_weights(self, weights: str) -> None:
        assert self._record is not None, "begin() comes first"
        if self._record.weights not in (None, weights) and len(self):
            raise RunChangedError(
                f"{self.path} was begun with a model whose weights were others. To go on, load the ones that it had; "
                f"else give another output, or {AFRESH.format(path=self.path)}",
                ["the weights of the model have changed"],
            )
        if self._record.weights != weights:
            self._record.weights = weights
            self._write_record()

    def _write_record(self) -> None:
        assert self._record is not None
        try:
            self._record.write(self._record_path)
        except OSError as error:
            raise OutputWriteError(
                f"{self._record_path} could not be written: {reason(error)}. {len(self):,} results are kept",
                kept=len(self),
                number=error.errno,
            ) from error

    def missing(self, count: int | None = None) -> np.ndarray:
        count = self._count if count is None else min(count, self._count)
        if self.complete:
            if len(self) < count:
                raise RunChangedError(
                    f"{self.path} is complete with {len(self):,} results, and {count:,} are asked for now. A table "
                    f"cannot be gone on with (a .jsonl file can): give another output, or "
                    f"{AFRESH.format(path=self.path)}",
                    [f"{count:,} records are asked for"],
                )
            return np.zeros(0, dtype=np.int64)
        todo = np.ones(count, dtype=bool)
        done = self._journal.indices
        todo[done[done < count]] = False
        return np.flatnonzero(todo)

    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        self._journal.append(lines)

    def finish(self, *, order: str = "input", figures: dict[str, Any] | None = None) -> None:
        if order not in ORDERS:
            raise OutputFileError(f"order {order!r}: it is one of {', '.join(ORDERS)}")
        if self.complete:
            return
        assert self._record is not None, "begin() comes first"
        if self._table:
            self._journal.sync()
            self._write_table()
        else:
            if order == "input":
                self._journal.put_in_order()
            self._journal.sync()
        if not self._same:
            self._record.finish(figures, len(self))
            self._write_record()
        self._ended = self._table  # the journal goes last: until then the next run would only write the table again

    def _write_table(self) -> None:
        try:
            with replacing(self.path) as descriptor:
                if self.format == "parquet":
                    write_parquet(descriptor, self._journal.in_order)
                else:
                    write_csv(descriptor, self._journal.in_order, "\t" if self.format == "tsv" else ",")
            os.close(descriptor)
        except OSError as error:
            raise OutputWriteError(
                f"{self.path} could not be written: {reason(error)}. All {len(self):,} results are kept, in "
                f"{self._journal_path}: the same command makes the table of them",
                kept=len(self),
                number=error.errno,
            ) from error

    def close(self) -> None:
        self._journal.close(remove=self._ended)
        if self._ended:
            sync_folder(self.path)
        self._ended = False


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
