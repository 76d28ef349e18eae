"""``merge_shards``: the results of jobs that ran a part of a file each, to one output."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import FilesError, OutputFileError, RunChangedError
from ..inputs.short_tracebacks import with_short_tracebacks
from ..notices import warn_user
from ..wording import counted, differing, in_ranges
from .output import FileOutput, open_output
from .paths import real_path
from .report import FileReport
from .run_record import RunRecord, record_path
from .shards import Shard, output_of, shards_beside
from .streams import is_stream
from .tables import format_of

_SUMMED = ("beyond_context", "prompt_tokens", "computed_tokens", "new_tokens", "seconds", "loading_seconds")
_MOST_SHOWN = 8
_LINES_AT_ONCE = 1000
_HOW = "Each job runs `hf-batchllm run IN {output} --shard I/N`, or run_file(..., shard='I/N')"


@with_short_tracebacks
def merge_shards(
    target: str | os.PathLike[str],
    *,
    output_format: str | None = None,
    partial: bool = False,
    restart: bool = False,
) -> FileReport:
    """Join the results of all parts of a file into ``target``, as if one run had written it.

    target: the output that each job was given. The results of ``run_file(..., shard="2/8")`` are beside it, in
        ``<target>.shard-2-of-8.jsonl``. They are not changed, and not deleted.
    output_format: "jsonl", "csv", "tsv" or "parquet", if the suffix does not say it.
    partial: merge what is there, even if results are missing. Another merge adds more, and so does a run of the whole
        file with the same settings.
    restart: begin afresh; what is in ``target`` is moved to ``<target>.bak-1``.
    """
    return merge(os.fspath(target), output_format, partial=partial, restart=restart, note=warn_user)


def merge(
    target: str, output_format: str | None, *, partial: bool, restart: bool, note: Callable[[str], None]
) -> FileReport:
    if is_stream(target):
        name = "stdout" if target == "-" else target
        raise OutputFileError(f"{name} is no file: give the output that the jobs were given, whose parts are beside it")
    format_of(target, output_format, OutputFileError)
    parts = _Parts(target, note)
    missing = parts.count - int(parts.answered.sum())
    if missing == parts.count and missing:
        raise FilesError(f"{target} cannot be merged, as no part has a result yet: {parts.lacks}")
    if missing and not partial:
        raise FilesError(
            f"{target} cannot be merged yet, as {missing:,} of {parts.count:,} results are missing: {parts.lacks}. "
            "Run these jobs again, and each continues; or `--partial` merges what is there"
        )
    with open_output(target, output_format, records=parts.records, restart=restart, note=note) as output:
        record = output.begin(parts.record, np.arange(parts.count))
        left = np.zeros(parts.records, dtype=bool)
        left[output.missing()] = True
        # An error that has run again since has a result now.
        wanted = parts.answered & (left | (output.is_error & ~parts.is_error))
        report = FileReport(target, parts.count, written=int(wanted.sum()))
        report.before = parts.count - int((left | wanted).sum())
        report.errors = int(np.where(wanted, parts.is_error, output.is_error)[: parts.count].sum())
        report.errors_in = "response.body.error" if record.settings.get("dialect") == "openai" else "error"
        report.then = parts.what_now(report.left)
        if report.written:
            output.start(parts.record.model)
            for lines in parts.lines(wanted):
                output.append(lines)
        output.finish(figures=None if report.left else parts.figures(report))
        return report


@dataclass(frozen=True)
class _Begun:
    """A part that has begun. ``results``: how many it has, of ``size``."""

    shard: Shard
    record: RunRecord
    results: int

    @property
    def size(self) -> int:
        return int(self.record.shard["results"])


class _Parts:
    """The parts beside an output, each looked at under its lock, and checked: all are of one run. None is changed.

    count: the records of all parts. records: those of the input. answered, is_error: [records] whether there is a
    result, and whether it is an error.
    """

    def __init__(self, output: str, note: Callable[[str], None]) -> None:
        self.output = output
        self.begun: list[_Begun] = []
        shards = self._found()
        self.of, self.records, self.count = shards[0].of, 0, 0
        self.answered = self.is_error = np.zeros(0, dtype=bool)
        for shard in shards:
            path = shard.place(output)
            record = RunRecord.read(record_path(real_path(path)))
            if record is None and not os.path.getsize(path):
                continue
            if record is None:
                raise OutputFileError(
                    f"{path} has results, and {record_path(path)}, which would say how they were made, is not there. "
                    "If you renamed the results, rename their .run.json, too; else move the file away"
                )
            self._check_same_run(shard, record)
            with FileOutput(path, records=self.records, note=note) as part:
                self._enter(shard, record, part)
        if not self.begun:
            raise OutputFileError(f"{output} cannot be merged: no part of it has begun")
        versions = sorted({part.record.version for part in self.begun})
        if len(versions) > 1:
            note(f"the parts come from versions {', '.join(versions)} of the library: single tokens may differ")

    def _found(self) -> list[Shard]:
        """The parts whose files are there. OutputFileError if there are none, or those of several splits."""
        output, found = self.output, shards_beside(self.output)
        sizes = sorted({shard.of for shard in found})
        wrong = next((shard for shard in found if shard.part > shard.of), None)
        why = ""
        if not found and (whole := output_of(output)):
            why = f"{output} is one part: give the output that the jobs were given, {whole}"
        elif not found:
            why = f"{output} has no parts: there is no {output}.shard-1-of-N.jsonl. {_HOW.format(output=output)}"
        elif len(sizes) > 1:
            each = [f"{in_ranges((s.part for s in found if s.of == of), _MOST_SHOWN)} of {of:,}" for of in sizes]
            why = f"{output} has parts of different splits: {' and '.join(each)}. Move away those of all splits but one"
        elif wrong is not None:
            why = f"{wrong.place(output)} is no part that a job has written: move it away"
        if why:
            raise OutputFileError(why)
        return found

    def _check_same_run(self, shard: Shard, record: RunRecord) -> None:
        if record.part != shard.words:
            why = f"is of {record.part}, by its run record: give each file its old name, or move it away"
            raise OutputFileError(f"{shard.place(self.output)} {why}")
        if not self.begun:
            self.records, self.count = int(record.input.get("records") or 0), int(record.shard["records"])
            self.answered, self.is_error = np.zeros((2, self.records), dtype=bool)
            return
        one, other, first = self.begun[0].shard.part, shard.part, self.begun[0].record
        differences = first.differences(record, f"{{name}} is {{before}} in part {one} and {{after}} in part {other}")
        if first.input.get("digest") != record.input.get("digest"):
            differences.append(f"the input of part {other} is not that of part {one}")
        elif self.count != record.shard["records"]:
            limits = f"part {one} is one of {self.count:,} records, and part {other} of {record.shard['records']:,}"
            differences.append(f"{limits} records (see --limit)")
        if model := differing(self.record.model, record.model):
            differences.append(f"part {other} had {model} than part {one}")
        if differences:
            raise RunChangedError(
                f"{self.output} cannot be merged, as its parts are of different runs: {'; '.join(differences)}. "
                "Run the wrong part again as the others were run, with `--restart`",
                differences,
            )

    def _enter(self, shard: Shard, record: RunRecord, part: FileOutput) -> None:
        has_result = part.journal.start >= 0
        twice = np.flatnonzero(has_result & self.answered)
        why = ""
        if part.journal.beyond or has_result[self.count :].any():
            why = f"a record beyond the {self.count:,} of the parts"
        elif len(twice):
            why = f"record {int(twice[0]) + 1:,}, and so has another part: run this part again with `--restart`"
        if why:
            raise OutputFileError(f"{part.path} has a result for {why}")
        self.answered |= has_result
        self.is_error |= part.is_error
        self.begun.append(_Begun(shard, record, len(part)))

    @property
    def lacks(self) -> str:
        """``part 3 has 120 of 1,250 results; part 5 has not begun (1,250 records)``"""
        unfinished = [part for part in self.begun if part.results < part.size]
        lacks = [
            f"part {part.shard.part:,} has {part.results:,} of {part.size:,} results"
            for part in unfinished[:_MOST_SHOWN]
        ]
        hidden = len(unfinished) - _MOST_SHOWN
        lacks += [f"{hidden:,} more parts are unfinished"] if hidden > 0 else []
        records = self.count - sum(part.size for part in self.begun)
        if records:
            others = sorted({*range(1, self.of + 1)}.difference(part.shard.part for part in self.begun))
            which = f"parts {in_ranges(others, _MOST_SHOWN)} have" if len(others) > 1 else f"part {others[0]:,} has"
            lacks.append(f"{which} not begun ({counted(records, 'record')})")
        return "; ".join(lacks)

    def what_now(self, left: int) -> str:
        """``left``: how many results are missing after a merge."""
        if not left:
            return (
                "the parts are not needed any more, and may be deleted: "
                f"{self.output}.shard-*-of-{self.of}.jsonl and their .run.json"
            )
        are = "is" if left == 1 else "are"
        return (
            f"{left:,} of {self.count:,} {are} missing: {self.lacks}. Run these jobs again and merge again, or "
            f"continue {self.output} by a run of the whole file"
        )

    @property
    def record(self) -> RunRecord:
        """How all results were made: the run record of one run that made them."""
        records = [part.record for part in self.begun]
        return RunRecord(
            records[0].settings,
            records[0].seed,
            next((record.model for record in records if record.model), {}),
            records[0].input,
            records[0].version,
            min(record.created for record in records),
        )

    def lines(self, wanted: np.ndarray) -> Iterator[list[tuple[int, bytes]]]:
        """The results of the records that are ``wanted`` ([records]), part by part."""
        for begun in self.begun:
            with FileOutput(begun.shard.place(self.output), records=self.records) as part:
                if len(part) != begun.results:
                    raise OutputFileError(f"{part.path} has changed meanwhile: run the same command again")
                numbers = np.flatnonzero((part.journal.start >= 0) & wanted)
                for first in range(0, len(numbers), _LINES_AT_ONCE):
                    yield list(part.journal.items(numbers[first : first + _LINES_AT_ONCE]))

    def figures(self, report: FileReport) -> dict[str, Any]:
        """The figures that a run has. Tokens and seconds are summed over the jobs."""
        each = [part.record.figures for part in self.begun]
        summed = {name: sum(figures.get(name) or 0 for figures in each) for name in _SUMMED}
        return {"records": report.records, "before": 0, "written": report.records, "errors": report.errors, **summed}
