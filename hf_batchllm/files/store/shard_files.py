"""The files of parts beside an output: which there are, what each holds, and whether they are of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from ...errors import OutputFileError, RunChangedError
from ...wording import differing, in_ranges
from .file_output import writer_of
from .journal import Journal
from .output import ResultLayout
from .paths import real_path, reason
from .run_record import RunRecord, record_path
from .shards import Shard, output_of, shards_beside

_MOST_SHOWN = 8
_HOW = "Each job runs `hf-batchllm run IN {output} --shard I/N`, or run_file(..., shard='I/N')"


@dataclass(frozen=True)
class ShardFile:
    """A part that has begun. ``results``: how many it has."""

    shard: Shard
    path: str
    record: RunRecord
    results: int

    @property
    def size(self) -> int:
        return int(self.record.shard["results"])

    @property
    def lacks(self) -> str:
        return f"part {self.shard.part:,} has {self.results:,} of {self.size:,} results"


@dataclass
class ShardFiles:
    """Looked at one after the other, each under its lock, and checked: all are parts of one run. None is changed."""

    output: str  # as the user gave it
    layout: ResultLayout
    note: Callable[[str], None]
    begun: list[ShardFile] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        shards = _found(self.output)
        self.of = shards[0].of
        numbers: dict[int, np.ndarray] = {}
        errors: dict[int, np.ndarray] = {}
        for shard in shards:
            with self._opened(shard, self.note) as journal:
                record = self._record_of(shard, journal)
                if record is None:
                    continue
                self.begun.append(ShardFile(shard, shard.place(self.output), record, len(journal)))
                numbers[shard.part], errors[shard.part] = journal.numbers, journal.errors
        if not self.begun:
            raise OutputFileError(f"{self.output} cannot be merged: no part of it has begun")
        self._check_same_run()
        self.count = int(self.begun[0].record.shard["records"])
        self.answered = np.zeros(self.count, dtype=bool)  # [records]
        self.is_error = np.zeros(self.count, dtype=bool)  # [records] whether the result is an error
        for part in self.begun:
            self._enter(part, numbers.pop(part.shard.part), errors.pop(part.shard.part))

    @property
    def missing(self) -> int:
        """How many results no part has."""
        return self.count - int(self.answered.sum())

    @property
    def lacks(self) -> str:
        """``part 3 has 120 of 1,250 results; part 5 has not begun (1,250 records)``"""
        unfinished = [part.lacks for part in self.begun if part.results < part.size]
        hidden = len(unfinished) - _MOST_SHOWN
        lacks = unfinished[:_MOST_SHOWN] + ([f"{hidden:,} more parts are unfinished"] if hidden > 0 else [])
        records = self.count - sum(part.size for part in self.begun)
        if records:
            there = {part.shard.part for part in self.begun}
            others = [number for number in range(1, self.of + 1) if number not in there]
            which = f"parts {in_ranges(others, _MOST_SHOWN)} have" if len(others) > 1 else f"part {others[0]:,} has"
            lacks.append(f"{which} not begun ({records:,} {'record' if records == 1 else 'records'})")
        return "; ".join(lacks)

    @property
    def record(self) -> RunRecord:
        """How all results were made: the run record of one run that made them."""
        first = self.begun[0].record
        return replace(
            first,
            model=next((part.record.model for part in self.begun if part.record.model), {}),
            created=min(part.record.created for part in self.begun),
            shard={},
        )

    def pieces(self, wanted: np.ndarray) -> Iterator[list[tuple[int, bytes]]]:
        """The results of the records that are ``wanted`` ([records]), part by part, some at a time."""
        for part in self.begun:
            with self._opened(part.shard, lambda message: None) as journal:
                if len(journal) != part.results:
                    raise OutputFileError(f"{part.path} has changed meanwhile: run the same command again")
                yield from journal.pieces(wanted)

    @contextmanager
    def _opened(self, shard: Shard, note: Callable[[str], None]) -> Iterator[Journal]:
        path = real_path(shard.place(self.output))

        def busy() -> str:
            return (
                f"{shard.words} is being written now{writer_of(path)}: merge when this job has ended, or stop it. What "
                "it has written is kept"
            )

        try:
            journal = Journal(path, fsync="never", identify=self.layout.identify, note=note, busy=busy)
        except OSError as error:
            raise OutputFileError(f"{path} cannot be read: {reason(error)}") from error
        try:
            journal.scan()
            yield journal
        except OSError as error:
            raise OutputFileError(f"{path} cannot be read: {reason(error)}") from error
        finally:
            journal.close()

    def _record_of(self, shard: Shard, journal: Journal) -> RunRecord | None:
        path = shard.place(self.output)
        record = RunRecord.read(record_path(real_path(path)))
        if record is None:
            if journal.empty:
                return None
            raise OutputFileError(
                f"{path} has results, and {record_path(path)}, which says how they were made, is not there. If you "
                "renamed the results, rename their .run.json, too; else move the file away"
            )
        if not record.shard:
            raise OutputFileError(
                f"{path} was not written by a job with a part: move it away. {_HOW.format(output=self.output)}"
            )
        written = Shard(record.shard["part"], record.shard["of"])
        if written != shard:
            raise OutputFileError(f"{path} is {written.words}, by its run record: give both files their old names")
        return record

    def _check_same_run(self) -> None:
        first, known = self.begun[0], None
        for part in self.begun:
            one, other = first.shard.part, part.shard.part
            words = f"{{name}} is {{before}} in part {one} and {{after}} in part {other}"
            differences = first.record.differences(part.record, words)
            if first.record.input.get("digest") != part.record.input.get("digest"):
                differences.append(f"the input of part {other} is not that of part {one}")
            elif first.record.shard["records"] != part.record.shard["records"]:
                limits = [f"{each.record.shard['records']:,} records" for each in (first, part)]
                differences.append(f"part {one} is one of {limits[0]}, and part {other} of {limits[1]} (see --limit)")
            elif first.record.shard.get("split") != part.record.shard.get("split"):
                versions = [each.record.version for each in (first, part)]
                differences.append(
                    f"part {other} was split off in another way than part {one} (versions {versions[1]} and "
                    f"{versions[0]} of the library)"
                )
            if part.record.model:
                known = known or part
                if model := differing(known.record.model, part.record.model):
                    differences.append(f"part {other} had {model} than part {known.shard.part}")
            if differences:
                raise RunChangedError(
                    f"{self.output} cannot be merged, as its parts are of different runs: {'; '.join(differences)}. "
                    "Run the wrong part again as the others were run, with `--restart`",
                    differences,
                )
        versions = sorted({part.record.version for part in self.begun})
        if len(versions) > 1:
            self.note(f"the parts come from versions {', '.join(versions)} of the library: single tokens may differ")

    def _enter(self, part: ShardFile, numbers: np.ndarray, errors: np.ndarray) -> None:
        if len(numbers) and int(numbers.max()) >= self.count:
            raise OutputFileError(
                f"{part.path} has a result for record {int(numbers.max()) + 1:,}, and there are only {self.count:,}"
            )
        twice = numbers[self.answered[numbers]]
        if len(twice):
            raise OutputFileError(
                f"{part.path} has a result for record {int(twice[0]) + 1:,}, and so has another part: run this part "
                "again with `--restart`"
            )
        self.answered[numbers] = True
        self.is_error[errors] = True


def _found(output: str) -> list[Shard]:
    """The parts whose files are there. OutputFileError if there are none, or those of several splits."""
    found = shards_beside(output)
    if not found and (whole := output_of(output)):
        raise OutputFileError(f"{output} is one part: give the output that the jobs were given, {whole}")
    if not found:
        raise OutputFileError(
            f"{output} has no parts: there is no {output}.shard-1-of-N.jsonl. {_HOW.format(output=output)}"
        )
    sizes = sorted({shard.of for shard in found})
    if len(sizes) > 1:
        each = [f"{in_ranges((s.part for s in found if s.of == of), _MOST_SHOWN)} of {of:,}" for of in sizes]
        raise OutputFileError(
            f"{output} has parts of different splits: {' and '.join(each)}. Move away those of all splits but one, "
            "with their .run.json"
        )
    wrong = next((shard for shard in found if shard.part > shard.of), None)
    if wrong is not None:
        raise OutputFileError(f"{wrong.place(output)} is no part that a job has written: move it away")
    return found
