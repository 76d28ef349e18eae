"""From the records of a file to their results: windows, calls of the generator, lines of the output.

Each result is written as soon as it is there. It depends on the record, the record's number and the run's seed alone,
so a run that was stopped anywhere and continued gives the same results as a run in one go.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.progress import WholeRun, whole_run
from ..errors import FilesError, InputFileError, PromptError
from ..inputs.grammar_options import as_list
from ..inputs.preparing import bars_shown, bars_wanted
from ..inputs.prompt_options import as_lists
from ..results.generations import Generation
from ..sampling.nothing_to_draw import NothingToDrawError
from .calls_with_images import ROOM, in_calls
from .file_report import FileReport
from .record_engine import RecordEngine
from .records.line_configs import LineConfig
from .records.prompt_records import OPENAI, BadPromptRecord, PromptRecord
from .records.record_reader import RecordReader
from .records.result_lines import ResultWriter
from .records.settings import GenerationSettings
from .records.token_texts import TokenTexts
from .run_options import RunOptions
from .store.open_output import kept_in
from .store.output import Output
from .store.run_record import RunRecord
from .store.shards import Part
from .store.sources import Source, record_key

_MIN_RECORDS_WITH_BAR = 32  # fewer records show a progress bar only if asked to
_MIN_LOGPROBS = 20  # of each token: the most that OpenAI's interface returns
_MOST_FAILING_ALONE = 8  # records whose scores are no numbers, before a run without any good result is given up
_MOST_PROBLEMS_SHOWN = 8  # bad records spelled out in an error


def run_records(
    gen: RecordEngine | Callable[[], RecordEngine],
    source: Source,
    target: str,
    *,
    output: Output,  # open, of this target
    reader: RecordReader,  # its ``base`` holds the settings of the run
    options: RunOptions,
    identity: Mapping[str, Any],  # what results depend on: a run that continues must have the same
    model_name: str,
    note: Callable[[str], None],
    part: Part | None = None,  # which records are run, if not all
    loading_seconds: float = 0.0,  # in which the library was loaded, where that is part of the run
) -> FileReport:
    """``gen``: what runs them, or a function that makes it and is called only if there are records to run."""
    limit, began, loading = options.limit, time.perf_counter(), 0.0
    with ExitStack() as opened:
        asked = RunRecord(settings=dict(identity), seed=options.seed)
        record = output.begin(asked, source, limit=limit, retry_errors=options.retry_errors, part=part)
        todo = output.missing(limit)
        asked_for = source.count if limit is None else min(limit, source.count)
        report = FileReport(target, records=asked_for if part is None else len(part.numbers))
        report.part = None if part is None else part.shard.words
        report.errors_in = "response.body.error" if reader.dialect == OPENAI else "error"
        report.before, report.errors = report.records - len(todo), int((output.errors < asked_for).sum())
        if output.complete:  # a table: its journal is gone
            report.errors = int(record.figures.get("errors") or 0)
        if options.on_error == "raise":
            _refuse_bad_records(reader, source, todo)
        if len(todo):
            if isinstance(gen, RecordEngine):
                engine = gen
            else:
                there = f"{report.before:,} of {report.records:,} results are there; " if report.before else ""
                note(f"{there}loading {model_name}")
                loads = time.perf_counter()
                engine = gen()
                loading = time.perf_counter() - loads
                report.loading_seconds = loading_seconds + loading
                opened.callback(engine.close)
            output.confirm_model(engine.fingerprint)
            writer = ResultWriter(
                reader.dialect,
                tokens=TokenTexts(engine.tokenizer),
                token_ids=options.token_ids,
                model=model_name,
                where=source.where,
                created=int(datetime.datetime.fromisoformat(record.created).timestamp()),
                note=note,
            )
            run = _FileRun(engine, source, output, reader, writer, options, record.seed or 0, report)
            try:
                run.run_windows(todo)
            except Exception as error:
                kept = report.before + report.written
                place = kept_in(target, options.format)
                if kept and not isinstance(error, FilesError) and place:
                    error.add_note(
                        f"{kept:,} of {report.records:,} results are {place}: run the same again, and it goes on "
                        "from them"
                    )
                raise
        report.seconds = time.perf_counter() - began - loading
        if not report.left:
            output.finish(order=options.order, figures=report.figures())
            report.seconds = time.perf_counter() - began - loading
        return report


def _refuse_bad_records(reader: RecordReader, source: Source, todo: np.ndarray) -> None:
    """Reads all records once before any is run."""
    problems: list[str] = []
    count = 0
    for chunk in source.chunks(todo):
        for number, raw in zip(chunk.tolist(), source.records(chunk), strict=True):
            record = reader.read(number, raw)
            if isinstance(record, BadPromptRecord):
                count += 1
                problems += [str(record)] if count <= _MOST_PROBLEMS_SHOWN else []
    if problems:
        raise _refusal(f"{source.name} has records that cannot be run:", problems, count)


def _refusal(headline: str, problems: Sequence[str], count: int) -> InputFileError:
    shown = problems[:_MOST_PROBLEMS_SHOWN]
    more = [f"... and {count - len(shown):,} more"] if count > len(shown) else []
    return InputFileError("\n  ".join([headline, *shown, *more]))


@dataclass
class _FileRun:
    engine: RecordEngine
    source: Source
    output: Output
    reader: RecordReader
    writer: ResultWriter
    options: RunOptions
    seed: int
    report: FileReport

    def __post_init__(self) -> None:
        self._context = self.engine.facts.context
        self._keys: dict[int, str] = {}  # of the records of this window that have no result yet
        self._whole: WholeRun | None = None
        self._failed_alone = 0  # records, before the first good result

    def run_windows(self, todo: np.ndarray) -> None:
        """``todo``: the numbers of the records to run."""
        windows = self.source.windows(todo, self.options.window_bytes, self.reader.prompt_text)
        shown = bars_shown(self.options.progress, len(todo) >= _MIN_RECORDS_WITH_BAR)
        with whole_run(self.report.records, self.report.before, shown) as self._whole, bars_wanted(shown):
            for window in windows:
                self._run_window(window)
        self._whole = None

    def _run_window(self, numbers: np.ndarray) -> None:
        calls: dict[tuple[int, ...], list[PromptRecord]] = {}
        for number, raw in zip(numbers.tolist(), self.source.records(numbers), strict=True):
            self._keys[number] = record_key(raw)
            record = self.reader.read(number, raw)
            if isinstance(record, BadPromptRecord):
                self._write_error(record)
                continue
            settings = record.settings
            resolved = self.engine.resolved(settings)
            if isinstance(resolved, str):
                self._write_error(record, self.reader.why(raw, settings, resolved))
                continue
            # The model's own config may ask for beams, too.
            beams = resolved.beams > 1
            # All records of a call get as many log-probabilities as the record that asks for most.
            call_key = beams, *settings.call_key, max(settings.logprobs or 0, _MIN_LOGPROBS)
            calls.setdefault(call_key, []).append(record)
        room = ROOM * self.options.window_bytes
        for records in calls.values():
            for some in in_calls(records, self.reader.images, room, lambda: self.engine.most_of_an_image):
                self._run_call(some)
        assert not self._keys

    def _run_call(self, records: Sequence[PromptRecord]) -> None:
        assert self._whole is not None
        self._whole.call_begins(len(records))
        settings = [record.settings for record in records]
        options: dict[str, Any] = {}
        if settings[0].adapter is not None:
            options["adapter"] = [each.adapter for each in settings]
        wanted = [each.logprobs for each in settings if each.logprobs is not None]
        if wanted:
            options["logprobs"] = max(wanted)
        options |= as_lists([each.prompt_options for each in settings]) | as_list([each.grammar for each in settings])
        waiting: dict[int, list[Generation]] = {}  # place in ``records`` -> its samples so far
        configs = [self._resolved(each) for each in settings]
        try:
            with self.engine.stream(
                [record.prompt for record in records],
                [each.config for each in configs],
                [self._seed_of(record) for record in records],
                self.options.on_error,
                not self._whole.bar.disable,
                lambda place: self.source.where(records[place].number),
                options,
            ) as generations:
                for generation in generations:
                    place = generation.index
                    samples = waiting.setdefault(place, [])
                    samples.append(generation)
                    if len(samples) == configs[place].samples:
                        del waiting[place]
                        self._write_result(records[place], sorted(samples, key=lambda sample: sample.sample))
        except NothingToDrawError as error:
            # One record's settings broke the call off: the others of the call must not suffer.
            self._without(error, [record for record in records if record.number in self._keys])
        except PromptError as error:
            problems = [
                f"{self.source.where(records[place].number)}: the prompt {why}" for place, why in error.problems.items()
            ]
            raise _refusal(f"{self.source.name} has prompts that cannot be run:", problems, len(problems)) from error
        self.report.add(self.engine.last_report)

    def _resolved(self, settings: GenerationSettings) -> LineConfig:
        """Of a record without a problem."""
        resolved = self.engine.resolved(settings)
        assert isinstance(resolved, LineConfig), resolved
        return resolved

    def _without(self, error: NothingToDrawError, left: Sequence[PromptRecord]) -> None:
        """Runs the rest of a call in two halves, until the records that fail stand alone."""
        if self.options.on_error == "raise" or self._failed_alone >= _MOST_FAILING_ALONE:
            raise error  # where nothing but such errors came, the model itself is to blame
        if len(left) > 1:
            middle = len(left) // 2
            for half in (left[:middle], left[middle:]):
                self._run_call(half)
            return
        self._failed_alone += self.report.written == self.report.errors
        for record in left:
            self._write_error(record, str(error))

    def _seed_of(self, record: PromptRecord) -> int:
        """The record's own seed, or one made of the run's seed and the record's number."""
        if record.settings.seed is not None:
            return record.settings.seed
        made = hashlib.blake2b(f"{self.seed} {record.number}".encode(), digest_size=8)
        return int.from_bytes(made.digest(), "little")

    def _write_result(self, record: PromptRecord, samples: Sequence[Generation]) -> None:
        self.report.errors += any(sample.error is not None for sample in samples)
        warning = self._beyond_context(samples)
        self.report.beyond_context += warning is not None
        self._append(record.number, self.writer.result(record, self._keys.pop(record.number), samples, warning))

    def _beyond_context(self, samples: Sequence[Generation]) -> str | None:
        tokens = max(len(sample.prompt_token_ids) + len(sample.token_ids) for sample in samples)
        if self._context is None or tokens - 1 <= self._context:  # the last token is never run
            return None
        return f"prompt and answer have {tokens:,} tokens, more than the {self._context:,} that the model was made for"

    def _write_error(self, record: PromptRecord | BadPromptRecord, why: str | None = None) -> None:
        if self.options.on_error == "raise":
            problem = str(record) if why is None else f"{self.source.where(record.number)}: {why}"
            raise InputFileError(f"{self.source.name}, {problem}")
        self.report.errors += 1
        self._append(record.number, self.writer.error(record, self._keys.pop(record.number), why))

    def _append(self, number: int, line: bytes) -> None:
        self.output.append([(number, line)])
        self.report.written += 1
        if self._whole is not None:
            self._whole.done += 1
