"""Where results go: a file that a later run continues, or a stream.

Beside ``out.jsonl`` stands its run record, ``out.jsonl.run.json``. A table is written at the end, from a journal
``out.csv.part.jsonl`` that is removed when the table is there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import FilesError, OutputFileError, OutputWriteError, RunChangedError
from ..notices import warn_user
from ..wording import differing
from .journal import ORDERS, Journal, seconds_between_syncs
from .paths import real_path, reason, replacing, temporary_beside
from .run_record import RunRecord, record_path
from .sources import Source, record_key
from .streams import StreamOutput, is_stream
from .tables import TABLES, format_of, import_pyarrow, write_table

RESTART_HINT = (
    "`--restart` begins afresh (the old results are moved to {path}.bak-1 or the next free number, never deleted)"
)


def open_output(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    source: Source | None = None,
    records: int = 0,
    fsync: str | float = "5s",
    restart: bool = False,
    note: Callable[[str], None] = warn_user,
) -> FileOutput | StreamOutput:
    """Locks the output and reads what is in it; nothing is changed before ``start``.

    format: jsonl, csv, tsv or parquet; by default the suffix says it. ``-`` is stdout; like everything that is no
    ordinary file, it takes JSON lines and cannot be continued. source: must be another file. records: how many the
    input has, where there is no source. fsync: always, never, or how often (``5s``). note: is called with what a person
    should hear.
    """
    path = os.fspath(path)
    seconds_between_syncs(fsync)
    if is_stream(path):
        if format not in (None, "jsonl"):
            raise OutputFileError(f"{path} is a stream and takes JSON lines: a {format} file needs a name of its own")
        return StreamOutput(path, source)
    kind = format_of(path, format, OutputFileError)
    if kind == "parquet":
        import_pyarrow()
    return FileOutput(path, kind, source, records if source is None else source.count, fsync, restart, note)


def journal_path(output: str, is_table: bool) -> str:
    """The file that takes each result as it comes."""
    return f"{output}.part.jsonl" if is_table else output


def writer_of(output: str) -> str:
    """`` (process 7 on node3, since ...)``: who writes to an output, as far as its run record says."""
    with contextlib.suppress(FilesError):
        record = RunRecord.read(record_path(output))
        if record is not None and record.process:
            return " (process {pid} on {host}, since {since})".format_map(record.process)
    return ""


class FileOutput:
    """``begin`` compares the run with an earlier one, ``start`` changes the first file; then ``append``, ``finish``.

    complete: it is a finished table, and there is nothing to do.
    """

    def __init__(
        self,
        path: str,
        kind: str,
        source: Source | None,
        records: int,
        fsync: str | float,
        restart: bool,
        note: Callable[[str], None],
    ) -> None:
        self.path = real_path(path)
        self._name = self.path if os.path.islink(path) else path
        self.complete = False
        self._kind, self._restart, self._note = kind, restart, note
        self._table = kind in TABLES
        self._record_path = record_path(self.path)
        self._old: RunRecord | None = None  # of the run that is continued
        self._record: RunRecord | None = None  # of this run
        self._retry_errors = self.started = False
        self._table_written = False
        self._afresh = RESTART_HINT.format(path=self.path)
        self._make_journal = lambda: Journal(
            journal_path(self.path, self._table), records, fsync=fsync, busy=self._busy, note=note
        )
        self._check_place(source)
        try:
            self._journal = self._make_journal()
        except OSError as error:
            raise OutputFileError(f"{self.path} cannot be written to: {reason(error)}") from error
        try:
            if not restart:
                self._read_earlier_run()
        except BaseException as error:
            self._journal.close()
            if isinstance(error, OSError):
                raise OutputFileError(f"{self.path} cannot be read: {reason(error)}") from error
            raise

    def _check_place(self, source: Source | None) -> None:
        if os.path.isdir(self.path):
            raise OutputFileError(f"{self.path} is a folder: give the name of a file in it")
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder):
            raise OutputFileError(f"{self.path} cannot be written: there is no folder {folder}")
        files = (journal_path(self.path, self._table), self._record_path, self.path)
        if source is not None and any(map(source.is_file, (*files, temporary_beside(self.path)))):
            raise OutputFileError(f"{source.name} is the input, and would be written to: give another output")

    def _busy(self) -> str:
        ranks = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
        each = (
            ". If each rank of this script runs it: with RankGenerator in BatchGenerator's place they run it together"
        )
        return (
            f"another run{writer_of(self.path)} is writing to {self.path}: wait for it, or give another output"
            f"{each if ranks else ''}"
        )

    def _read_earlier_run(self) -> None:
        self._journal.scan()
        record = RunRecord.read(self._record_path)
        if self._journal.file_size and record is None:
            raise OutputFileError(
                f"{self._journal.path} is not empty, and {self._record_path}, which would say how its results were "
                "made, is not there. If you renamed the results, rename their .run.json, too; else give another "
                f"output, or {self._afresh}"
            )
        if self._table and not self._journal.file_size and os.path.exists(self.path) and os.path.getsize(self.path):
            if record is None or record.finished is None:
                raise OutputFileError(
                    f"{self.path} exists already, and no run has written it: give another output, or {self._afresh}"
                )
            self.complete = True
        if len(self._journal) or self._journal.beyond is not None or self.complete:
            self._old = record  # else of a run that wrote no result, or whose results are gone

    def __len__(self) -> int:
        """How many results it holds."""
        return (self._old.results or 0) if self.complete and self._old is not None else len(self._journal)

    @property
    def kept(self) -> str:
        """Where a run that is not finished has its results, in words that follow "are"; "" where there are none."""
        if not len(self):
            return ""
        journal = journal_path(self._name, self._table)
        return f"in {journal} ({self._name} itself comes at the end)" if self._table else f"in {journal}"

    @property
    def has_result(self) -> np.ndarray:
        """[records] whether the journal has a result."""
        found: np.ndarray = self._journal.start >= 0
        return found

    @property
    def is_error(self) -> np.ndarray:
        """[records] whether the result of an earlier run is an error."""
        return self._journal.is_error

    # A run

    def begin(
        self,
        asked: RunRecord,
        numbers: np.ndarray,
        source: Source | None = None,
        *,
        seed: int | None = None,
        retry_errors: bool = False,
    ) -> RunRecord:
        """The run record in force, with its seed. RunChangedError if anything but the end of the input has changed.

        asked: with its settings, input and part. numbers: the records that the run is for. source: the input; without,
        results come from parts. seed: where neither ``asked`` nor an earlier run has one. retry_errors: records whose
        result is an error are run again.
        """
        self._numbers, self._retry_errors = numbers, retry_errors
        if self._old is not None:
            self._check_same(self._old, asked, source)
        if self._old is not None and source is not None and not self.complete:
            self._forget_old_errors(source)
        if self.complete and self._old is not None:
            if retry_errors:
                raise OutputFileError(
                    f"{self.path} is complete, and single rows of a table cannot be run again: "
                    f"write to a .jsonl file for that, or {self._afresh}"
                )
            return self._old
        self._record = asked.begun(self._old, seed)
        if self._old is not None:
            self._record.model = self._old.model
            if self._old.version != self._record.version:
                self._note(
                    f"{self.path} was begun with version {self._old.version} of the library, and continues with "
                    f"{self._record.version}: single tokens may differ"
                )
        return self._record

    def _check_same(self, old: RunRecord, asked: RunRecord, source: Source | None) -> None:
        words = "{name} was {before} and is {after}" if source else "{name} is {before} there and {after} in the parts"
        differences = old.differences(asked, words)
        was, now = (
            f"{each.part} (of {each.shard['records']:,} records)" if each.shard else each.part for each in (old, asked)
        )
        if was != now:
            differences.insert(0, f"it was {was}, and would now be {now}")
        changed = old.input.get("digest") != asked.input.get("digest")
        if changed and (source is None or asked.shard or self.complete):
            differences.append(f"the input has changed (it had {old.input.get('records') or 0:,} records)")
        if source is None and (other := differing(old.model, asked.model)):
            differences.append(f"it had {other}")
        if differences:
            table = " A finished table cannot be continued (a .jsonl file can)." if self.complete else ""
            raise self._changed(
                f"was begun as another run: {'; '.join(differences)}.{table} Give what it was begun with", differences
            )
        if changed and source is not None:
            self._check_records(source)

    def _changed(self, why: str, differences: Sequence[str]) -> RunChangedError:
        return RunChangedError(f"{self.path} {why}; else give another output, or {self._afresh}", differences)

    def _check_records(self, source: Source) -> None:
        """Compares the key of each result with its record in the input: lines may be added at its end."""
        journal = self._journal
        beyond = journal.answer_beyond if self._retry_errors else journal.beyond
        if beyond is not None:
            why = f"has a result for record {beyond + 1:,}, and {source.name} has only {source.count:,}"
            raise self._changed(
                f"{why}: it is another input, or it was cut. Give the old one", [f"{source.name} is shorter"]
            )
        for number, raw in source.read(np.flatnonzero(self._done)):
            if int(record_key(raw), 16) != journal.key[number]:
                where, error = f"{source.name}, {source.where(number)}", journal.is_error[number]
                why = f"has {'an error' if error else 'a result'} for {where}: this record has changed since"
                hint = "`--retry-errors` runs lines with errors again. " if error else ""
                raise self._changed(f"{why}. {hint}Give the old input", [f"{where} has changed"])

    def _forget_old_errors(self, source: Source) -> None:
        """Those of records that were corrected since: a run that was to make them again was stopped before."""
        journal = self._journal
        for number, raw in source.read(np.flatnonzero(self.has_result & self.is_error)):
            if int(record_key(raw), 16) != journal.key[number]:
                journal.start[number], journal.is_error[number] = -1, False

    @property
    def _done(self) -> np.ndarray:
        """[records] whether the result is not to be made again."""
        return self.has_result & ~self.is_error if self._retry_errors else self.has_result

    def missing(self) -> np.ndarray:
        """The numbers of the records that are to be run."""
        if self.complete:
            if len(self) < len(self._numbers):
                more = f"{len(self._numbers):,} are asked for now"
                why = f"is complete with {len(self):,} results, and {more}"
                raise self._changed(f"{why}. A table cannot be continued (a .jsonl file can)", [more])
            return self._numbers[:0]
        left: np.ndarray = self._numbers[~self._done[self._numbers]]
        return left

    def start(self, model: Mapping[str, str]) -> None:
        """Before the first result. ``model``: its digests; RunChangedError if an earlier part of the run had others."""
        assert self._record is not None, "begin() comes first"
        if other := differing(self._record.model, model):
            raise self._changed(f"was begun with {other}. Load the model that it was begun with", [f"it had {other}"])
        self._record.model = {**self._record.model, **model}
        self._start()

    def _start(self) -> None:
        if self._restart:
            self._move_away()
        with contextlib.suppress(OSError):
            os.unlink(temporary_beside(self.path))  # of a run that was killed
        self._write_record()
        self.started = True  # from here on the run record is this run's
        self._journal.prepare()

    def _move_away(self) -> None:
        """Deletes nothing. A copy of the run record goes first and the journal last: if the process is killed in
        between, the old run is still there."""
        there = [path for path in (self.path, self._journal.path) if os.path.exists(path) and os.path.getsize(path)]
        if not self._journal.has_name:  # somebody has put it elsewhere since: what is in it stays
            self._journal.close()
            self._journal = self._make_journal()
        if not there:
            return
        number = 1
        while any(os.path.lexists(f"{self.path}.bak-{number}{tail}") for tail in ("", ".part.jsonl", ".run.json")):
            number += 1
        aside = f"{self.path}.bak-{number}"
        try:
            if os.path.exists(self._record_path):
                shutil.copyfile(self._record_path, record_path(aside))
            for path in dict.fromkeys(there):
                os.rename(path, aside + path.removeprefix(self.path))
            if self._journal.path in there:
                self._journal.close()
                self._journal = self._make_journal()
        except OSError as error:
            raise OutputFileError(f"{self.path} cannot be moved to {aside}: {reason(error)}") from error
        self._note(f"what was in {self.path} is in {aside} now")

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

    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        """Each is (the record's number, a JSON object on one line, without the newline)."""
        self._journal.append(lines)

    def finish(self, order: str = "input", figures: Mapping[str, Any] | None = None) -> None:
        """Puts the results in order, or makes the table. ``figures``: of a run of which no result is missing."""
        if order not in ORDERS:
            raise OutputFileError(f"order {order!r}: it must be one of {', '.join(ORDERS)}")
        if self.complete:
            return
        assert self._record is not None, "begin() comes first"
        done_before = not self.started and self._old is not None and self._old.finished is not None
        if not self.started and not done_before:
            self._start()
        if not self._table:
            self._journal.compact(order)
        else:
            self._journal.sync()
            self._write_table()
        if figures is not None and not done_before:  # else it keeps the account of the run that did the work
            self._record.finish(figures, len(self))
            self._write_record()
        self._table_written = self._table and figures is not None

    def _write_table(self) -> None:
        try:
            with replacing(self.path) as file:
                write_table(file, self._kind, lambda: (line for _, line in self._journal.items()))
            file.close()
        except OSError as error:
            raise OutputWriteError(
                f"{self.path} could not be written: {reason(error)}. All {len(self):,} results are kept, in "
                f"{self._journal.path}: the same command makes the table of them",
                kept=len(self),
                number=error.errno,
            ) from error

    def close(self) -> None:
        """Appended results stay. What a run without a result has made goes."""
        finished = self._record is not None and self._record.finished is not None
        if self.started and not finished and not len(self):
            with contextlib.suppress(OSError):
                os.unlink(self._record_path)
        # The journal of a table goes last: until then the next run would only write the table again.
        self._journal.close(remove=self._table_written, keep=finished and not self._table)

    def __enter__(self) -> FileOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
