"""An output that a later run can continue.

Beside ``out.jsonl`` stands its run record, ``out.jsonl.run.json``. A table (CSV, Parquet) is written at the end, from a
journal ``out.csv.part.jsonl`` that is removed when the table is there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import FilesError, OutputFileError, OutputWriteError, RunChangedError
from ...wording import differing
from .formats import TABLES
from .journal import Journal
from .output import ORDERS, Output, ResultLayout
from .paths import real_path, reason, replacing, sync_folder, temporary_beside, write_atomically
from .resume_checks import RESTART_HINT, check_same_merge, check_same_run
from .run_record import RunRecord, record_path
from .shards import Part, Shard
from .sources import Source
from .table_outputs import write_csv, write_parquet


class FileOutput(Output):
    streams = False

    def __init__(
        self,
        path: str,
        kind: str,
        source: Source | None,
        fsync: str | float,
        restart: bool,
        layout: ResultLayout,
        note: Callable[[str], None],
        shard: Shard | None = None,  # which part of the input the output is for
    ) -> None:
        self.path = real_path(path)
        self.format = kind
        self._shard = shard
        self._part: Part | None = None
        self._layout = layout
        self._table = kind in TABLES
        self._record_path = record_path(self.path)
        self._journal_path = journal_path(self.path, self._table)
        self._has_old_record = os.path.exists(self._record_path)
        self._restart = restart
        self._note = note
        self._record: RunRecord | None = None
        self._nothing_to_do = False  # the run record stays as it is
        self._table_written = False
        self._afresh = RESTART_HINT.format(path=self.path)
        self._check_place(source)
        self._make_journal = lambda: Journal(
            self._journal_path, fsync=fsync, identify=layout.identify, note=note, busy=self._busy
        )
        try:
            self._journal = self._make_journal()
        except OSError as error:
            raise OutputFileError(f"{self.path} cannot be written to: {reason(error)}") from error
        try:
            if not restart:
                self._read_earlier_run()
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
        who = writer_of(self.path)
        if self._shard is not None:
            return (
                f"another job{who} is running {self._shard.words}, and writes to {self.path}: give each job a part of "
                "its own, or wait for it"
            )
        if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
            return (
                f"another run{who} is writing to {self.path}. Each rank of this script runs it, as it seems: with "
                "RankGenerator in BatchGenerator's place they run it together"
            )
        return f"another run{who} is writing to {self.path}: wait for it, or give another output"

    def _read_earlier_run(self) -> None:
        self._journal.scan()
        self._record = RunRecord.read(self._record_path)
        begun = not self._journal.empty
        if begun and self._record is None:
            raise OutputFileError(
                f"{self._journal_path} is not empty, and {self._record_path}, which would say how its results were "
                "made, is not there. If you renamed the results, rename their .run.json, too; else give another "
                f"output, or {self._afresh}"
            )
        if self._table and not begun and os.path.exists(self.path) and os.path.getsize(self.path):
            if self._record is None or self._record.finished is None:
                raise OutputFileError(
                    f"{self.path} exists already, and no run has written it: give another output, or {self._afresh}"
                )
            self.complete = True
        if not len(self._journal) and not self.complete:
            self._record = None  # of a run that wrote no result, or whose results are gone

    def __len__(self) -> int:
        if self.complete and self._record is not None:
            return self._record.results or 0
        return len(self._journal)

    @property
    def errors(self) -> np.ndarray:
        return self._journal.errors

    # A run

    def begin(
        self,
        record: RunRecord,
        source: Source,
        *,
        limit: int | None = None,
        retry_errors: bool = False,
        part: Part | None = None,
    ) -> RunRecord:
        self._count = source.count if limit is None else min(limit, source.count)
        self._part = part
        old = self._record
        if old is not None:
            check_same_run(
                self.path,
                old,
                record,
                source,
                journal=self._journal,
                complete=self.complete,
                retry_errors=retry_errors,
                part=part,
            )
        if self.complete:
            if retry_errors:
                raise OutputFileError(
                    f"{self.path} is complete, and single rows of a table cannot be run again: "
                    f"write to a .jsonl file for that, or {self._afresh}"
                )
            assert old is not None
            return old
        return self._begin(record.begin(old, source.summary(), part), retry_errors)

    def begin_merged(self, record: RunRecord, count: int) -> RunRecord:
        """In the place of ``begin``, where the results of other outputs are to be appended. ``record`` says how these
        were made, and ``count`` of how many records they are."""
        self._count = count
        if self._record is not None:
            check_same_merge(self.path, self._record, record)
        if self.complete:
            assert self._record is not None
            return self._record
        return self._begin(record.begin(self._record, record.input))

    def _begin(self, new: RunRecord, retry_errors: bool = False) -> RunRecord:
        old = self._record
        if self._restart:
            self._move_away()
        if old is not None and old.version != new.version:
            self._note(
                f"{self.path} was begun with version {old.version} of the library, and continues with {new.version}: "
                "single tokens may differ"
            )
        with contextlib.suppress(OSError):
            os.unlink(temporary_beside(self.path))  # of a run that was killed
        self._nothing_to_do = old is not None and bool(old.finished) and not len(self.missing())
        if old is not None and self._nothing_to_do and not (retry_errors and len(self.errors)):
            self._record = old  # keeps the account of the run that did the work
        else:
            self._nothing_to_do = False
            self._record = new
            self._write_record()
        self._journal.repair(drop_errors=retry_errors)
        return self._record

    def _move_away(self) -> None:
        """Deletes and overwrites nothing. A copy of the run record goes first and the journal last: if the process is
        killed in between, the old run is still there, to be continued or moved away again."""
        if not any(os.path.exists(path) and os.path.getsize(path) for path in (self.path, self._journal_path)):
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
            self._has_old_record = False
        except OSError as error:
            raise OutputFileError(f"{self.path} cannot be moved to {aside}: {reason(error)}") from error
        self._note(f"what was in {self.path} is in {aside} now")

    def confirm_model(self, fingerprint: dict[str, str]) -> None:
        assert self._record is not None, "begin() comes first"
        known = self._record.model if len(self) else {}
        if other := differing(known, fingerprint):
            raise RunChangedError(
                f"{self.path} was begun with {other}. To continue it, load the model that it was begun with; else give "
                f"another output, or {self._afresh}",
                [f"the model has {other}"],
            )
        if len(self) and not known:
            self._note(
                f"{self.path} was begun with a version of the library that kept no digest of the model: whether it "
                "continues with the same one is not known"
            )
        if self._record.model != known | fingerprint:
            self._record.model = known | fingerprint
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
                    f"cannot be continued (a .jsonl file can): give another output, or {self._afresh}",
                    [f"{count:,} records are asked for"],
                )
            return np.zeros(0, dtype=np.int64)
        todo = np.full(count, self._part is None)
        if self._part is not None:
            todo[self._part.numbers[self._part.numbers < count]] = True
        done = self._journal.numbers
        todo[done[done < count]] = False
        return np.flatnonzero(todo)

    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        self._journal.append(lines)

    def finish(self, *, order: str = "input", figures: dict[str, Any] | None = None) -> None:
        if order not in ORDERS:
            raise OutputFileError(f"order {order!r}: it must be one of {', '.join(ORDERS)}")
        if self.complete:
            return
        assert self._record is not None, "begin() comes first"
        self._arrange(order)
        if not self._nothing_to_do:
            self._record.finish(figures, len(self))
            self._write_record()
        # The journal goes last: until then the next run would only write the table again.
        self._table_written = self._table

    def finish_partly(self) -> None:
        """In the place of ``finish``, where results are missing: those that are there in the order of the input, or as
        a table. A later run continues from them."""
        if not self.complete:
            self._arrange("input")

    def _arrange(self, order: str) -> None:
        if self._table:
            self._journal.sync()
            self._write_table()
        else:
            if order == "input":
                self._journal.put_in_order()
            self._journal.sync()

    def _write_table(self) -> None:
        try:
            with replacing(self.path) as descriptor:
                if self.format == "parquet":
                    write_parquet(descriptor, self._journal.in_order, self._layout)
                else:
                    delimiter = "\t" if self.format == "tsv" else ","
                    write_csv(descriptor, self._journal.in_order, delimiter, self._layout)
            os.close(descriptor)
        except OSError as error:
            raise OutputWriteError(
                f"{self.path} could not be written: {reason(error)}. All {len(self):,} results are kept, in "
                f"{self._journal_path}: the same command makes the table of them",
                kept=len(self),
                number=error.errno,
            ) from error

    def close(self) -> None:
        unused = self._was_never_used()
        if unused and not self._has_old_record:
            with contextlib.suppress(OSError):
                os.unlink(self._record_path)
        self._journal.close(remove=self._table_written or (unused and self._journal.created))
        if self._table_written:
            sync_folder(self.path)
        self._table_written = False

    def _was_never_used(self) -> bool:
        """Whether this run was begun and then refused, or broken off, before its first result."""
        begun = self._record is not None and self._record.finished is None and not self.complete
        return begun and self._journal.is_open and self._journal.empty


def writer_of(output: str) -> str:
    """`` (process 7 on node3, since ...)``: who writes to an output, as far as its run record says."""
    with contextlib.suppress(FilesError):
        record = RunRecord.read(record_path(output))
        if record is not None and record.process:
            known = record.process
            return f" (process {known.get('pid')} on {known.get('host')}, since {known.get('since')})"
    return ""


def journal_path(output: str, is_table: bool) -> str:
    """The file that takes each result as it comes."""
    return f"{output}.part.jsonl" if is_table else output


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
