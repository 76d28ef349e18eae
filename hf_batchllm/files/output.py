"""Where results go: a file that a later run continues, or a stream.

Beside ``out.jsonl`` stands its run record, ``out.jsonl.run.json``. A table is made at the end, of a journal beside it,
``out.csv.part.jsonl``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import FilesError, OutputBusyError, OutputFileError, OutputWriteError, RunChangedError
from ..notices import warn_user
from ..wording import differing
from .journal import Journal, lock
from .paths import real_path, reason, replacing, temporary_beside
from .run_record import RunRecord, record_path
from .sources import Source
from .streams import StreamOutput, is_stream
from .tables import TABLES, format_of, import_pyarrow, write_table

RESTART_HINT = (
    "`--restart` begins afresh (the old results are moved to {path}.bak-1 or the next free number, never deleted)"
)
_IN_RANKS = ". If each rank of this script runs it: with RankGenerator in BatchGenerator's place they run it together"


def open_output(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    source: Source | None = None,
    records: int = 0,
    restart: bool = False,
    note: Callable[[str], None] = warn_user,
) -> FileOutput | StreamOutput:
    """Locks the output and reads what is in it; nothing is changed before ``start``.

    format: jsonl, csv, tsv or parquet; by default the suffix says it. ``-`` is stdout; like everything that is no
    ordinary file, it takes JSON lines and cannot be continued. source: must be another file. records: how many the
    input has, where there is no source. note: is called with what a person should hear.
    """
    path = os.fspath(path)
    if is_stream(path):
        if format not in (None, "jsonl"):
            raise OutputFileError(f"{path} is a stream and takes JSON lines: a {format} file needs a name of its own")
        return StreamOutput(path, source)
    kind = format_of(path, format, OutputFileError)
    if kind == "parquet":
        import_pyarrow()
    return FileOutput(path, kind, source, records if source is None else source.count, restart, note)


class FileOutput:
    """``begin`` compares the run with an earlier one, ``start`` changes the first file; then ``append``, ``finish``."""

    def __init__(
        self,
        path: str,
        kind: str = "jsonl",
        source: Source | None = None,
        records: int = 0,
        restart: bool = False,
        note: Callable[[str], None] = warn_user,
    ) -> None:
        self.path = real_path(path)
        self._name = self.path if os.path.islink(path) else path
        self._kind, self._restart, self._note = kind, restart, note
        self._table = kind in TABLES
        self._record_path = record_path(self.path)
        self._old: RunRecord | None = None  # of the run that is continued
        self._record: RunRecord | None = None  # of this run
        self._retry_errors = self.started = False
        self._afresh = RESTART_HINT.format(path=self.path)
        # Results as they come; and those of a run in another format, or the table.
        results, self._other = self.path, f"{self.path}.part.jsonl"
        if self._table:
            results, self._other = self._other, results
        self._make_journal = lambda: Journal(results, records, busy=self._busy, note=note)
        self._check_place(source, results)
        try:
            self.journal = self._make_journal()
        except OSError as error:
            raise OutputFileError(f"{self.path} cannot be written to: {reason(error)}") from error
        try:
            self._check_no_other_format()
            if not restart:
                self._read_earlier_run()
        except BaseException as error:
            self.journal.close()
            if isinstance(error, OSError):
                raise OutputFileError(f"{self.path} cannot be read: {reason(error)}") from error
            raise

    def _check_place(self, source: Source | None, results: str) -> None:
        if os.path.isdir(self.path):
            raise OutputFileError(f"{self.path} is a folder: give the name of a file in it")
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder):
            raise OutputFileError(f"{self.path} cannot be written: there is no folder {folder}")
        files = (results, self._record_path, self.path, temporary_beside(self.path))
        if source is not None and any(map(source.is_file, files)):
            raise OutputFileError(f"{source.name} is the input, and would be written to: give another output")

    def _check_no_other_format(self) -> None:
        """A run in another format has its results elsewhere, and the same run record."""
        with contextlib.suppress(FileNotFoundError, PermissionError), open(self._other, "rb") as file:
            if not lock(file.fileno(), self._other):
                raise OutputBusyError(self._busy())

    def _busy(self) -> str:
        who = ""
        with contextlib.suppress(FilesError):
            record = RunRecord.read(self._record_path)
            if record is not None and record.process:
                who = " (process {pid} on {host}, since {since})".format_map(record.process)
        ranks = _IN_RANKS if os.environ.get("WORLD_SIZE", "1") not in ("", "1") else ""
        return f"another run{who} is writing to {self.path}: wait for it, or give another output{ranks}"

    def _read_earlier_run(self) -> None:
        self.journal.scan()
        record = RunRecord.read(self._record_path)
        if self.journal.file_size and record is None:
            raise OutputFileError(
                f"{self.journal.path} is not empty, and {self._record_path}, which would say how its results were "
                "made, is not there. If you renamed the results, rename their .run.json, too; else give another "
                f"output, or {self._afresh}"
            )
        made_without = record is not None and record.results == 0
        if _size(self._other) and not self.journal.file_size and not made_without:
            raise OutputFileError(
                f"{self._other} exists already, and no run in this format has written it (or {self.journal.path} is "
                f"gone): give another output, or {self._afresh}"
            )
        if len(self) or self.journal.beyond:
            self._old = record  # else of a run that wrote no result, or whose results are gone

    def __len__(self) -> int:
        """How many results it holds."""
        return len(self.journal)

    @property
    def kept(self) -> str:
        """Where a run that is not finished has its results, in words that follow "are"; "" where there are none."""
        if not len(self):
            return ""
        return f"in {self._name}" + (f".part.jsonl ({self._name} itself comes at the end)" if self._table else "")

    @property
    def is_error(self) -> np.ndarray:
        """[records] whether the result of an earlier run is an error."""
        return self.journal.is_error

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
        self._record = asked.begun(self._old, seed)
        if self._old is not None:
            self._check_same(self._old, asked, source)
            if source is not None:  # errors of records that were corrected since, before a run that was killed
                corrected = self._with_another_key(source, self._has_result & self.is_error)
                self.journal.start[corrected], self.is_error[corrected] = -1, False
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
        if changed and (source is None or asked.shard):
            differences.append(f"the input has changed (it had {old.input.get('records') or 0:,} records)")
        if source is None and (other := differing(old.model, asked.model)):
            differences.append(f"it had {other}")
        if differences:
            raise self._changed(
                f"was begun as another run: {'; '.join(differences)}. Give what it was begun with", differences
            )
        if changed and source is not None:
            self._check_records(source)

    def _changed(self, why: str, differences: Sequence[str]) -> RunChangedError:
        return RunChangedError(f"{self.path} {why}; else give another output, or {self._afresh}", differences)

    def _check_records(self, source: Source) -> None:
        """Compares the key of each result with its record in the input: lines may be added at its end."""
        beyond = [number for number, error in self.journal.beyond.items() if not (error and self._retry_errors)]
        if beyond:
            why = f"has a result for record {max(beyond) + 1:,}, and {source.name} has only {source.count:,}"
            raise self._changed(
                f"{why}: it is another input, or it was cut. Give the old one", [f"{source.name} is shorter"]
            )
        for number in self._with_another_key(source, self._done)[:1].tolist():
            where, error = f"{source.name}, {source.where(number)}", self.is_error[number]
            why = f"has {'an error' if error else 'a result'} for {where}: this record has changed since"
            hint = "`--retry-errors` runs lines with errors again. " if error else ""
            raise self._changed(f"{why}. {hint}Give the old input", [f"{where} has changed"])

    def _with_another_key(self, source: Source, some: np.ndarray) -> np.ndarray:
        """Which of ``some`` ([records]) have a result of another record."""
        numbers = np.flatnonzero(some)
        changed: np.ndarray = numbers[source.keys[numbers] != self.journal.key[numbers]]
        return changed

    @property
    def _has_result(self) -> np.ndarray:
        found: np.ndarray = self.journal.start >= 0
        return found

    @property
    def _done(self) -> np.ndarray:
        """[records] whether the result is not to be made again."""
        return self._has_result & ~self.is_error if self._retry_errors else self._has_result

    def missing(self) -> np.ndarray:
        """The numbers of the records that are to be run."""
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
        self.journal.prepare()

    def _move_away(self) -> None:
        """Deletes nothing. A copy of the run record goes first and the journal last: if the process is killed in
        between, the old run is still there."""
        results = self.journal.path
        there = [path for path in (self._other, results) if _size(path)]
        if not self.journal.has_name:  # somebody has put it elsewhere since: what is in it stays
            self._reopen()
        if not there:
            return
        number = 1
        while any(os.path.lexists(f"{self.path}.bak-{number}{tail}") for tail in ("", ".part.jsonl", ".run.json")):
            number += 1
        aside = f"{self.path}.bak-{number}"
        try:
            if os.path.exists(self._record_path):
                shutil.copyfile(self._record_path, record_path(aside))
            for path in there:
                os.rename(path, aside + path.removeprefix(self.path))
            if results in there:
                self._reopen()
        except OSError as error:
            raise OutputFileError(f"{self.path} cannot be moved to {aside}: {reason(error)}") from error
        self._note(f"what was in {self.path} is in {aside} now")

    def _reopen(self) -> None:
        self.journal.close()
        self.journal = self._make_journal()

    def _write_record(self) -> None:
        assert self._record is not None
        try:
            self._record.write(self._record_path)
        except OSError as error:
            raise self._write_error(error, f"{self._record_path} could not be written", "are kept") from error

    def _write_error(self, error: OSError, what: str, kept: str) -> OutputWriteError:
        said = f"{what}: {reason(error)}. {len(self):,} results {kept}"
        return OutputWriteError(said, kept=len(self), number=error.errno)

    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        """Each is (the record's number, a JSON object on one line, without the newline)."""
        self.journal.append(lines)

    def finish(self, figures: Mapping[str, Any] | None = None) -> None:
        """Puts the results in order, and makes the table. ``figures``: of a run of which no result is missing."""
        assert self._record is not None, "begin() comes first"
        done_before = not self.started and self._old is not None and self._old.finished is not None
        if not self.started and not done_before:
            self._start()
        if not self._table:
            self.journal.compact()
        elif not (done_before and _size(self.path)):
            self.journal.sync()
            self._write_table()
        if figures is not None and not done_before:  # else it keeps the account of the run that did the work
            self._record.finish(figures, len(self))
            self._write_record()

    def _write_table(self) -> None:
        try:
            with replacing(self.path) as file:
                write_table(file, self._kind, lambda: (line for _, line in self.journal.items()))
            file.close()
        except OSError as error:
            kept = f"are kept, in {self.journal.path}: the same command makes the table of them"
            raise self._write_error(error, f"{self.path} could not be written", kept) from error

    def close(self) -> None:
        """Appended results stay. What a run without a result has made goes."""
        finished = self._record is not None and self._record.finished is not None
        if self.started and not finished and not len(self):
            with contextlib.suppress(OSError):
                os.unlink(self._record_path)
        self.journal.close(keep=finished)

    def __enter__(self) -> FileOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _size(path: str) -> int | None:
    """The bytes of a file; None where there is none."""
    return os.path.getsize(path) if os.path.exists(path) else None
