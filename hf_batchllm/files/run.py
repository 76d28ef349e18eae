"""One run from a file to a file: all that needs no model is checked, then records run. No torch before that."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..errors import FilesError, InputFileError
from ..inputs.images.image_sources import ImageSources
from .output import FileOutput
from .records import (
    OPENAI,
    BadPromptRecord,
    PromptRecord,
    RecordLayout,
    RecordReader,
    check_first_records,
    listed,
    make_reader,
)
from .report import FileReport
from .results import ResultWriter, TokenTexts
from .run_options import RunOptions
from .run_record import RunRecord, run_identity
from .settings import GenerationSettings
from .shards import Part
from .sources import Source, open_source
from .streams import StreamOutput

if TYPE_CHECKING:
    from .record_engine import RecordEngine


class Model(Protocol):
    """What answers the records: a generator that is there, or one that is loaded if there is a record to run."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """What results depend on: a run that continues must have the same."""

    def expect(self, reader: RecordReader, first: Sequence[PromptRecord]) -> None:
        """Refuses ``first``, the first records that can be run, as far as it can be known before it is loaded."""

    def ready(self, report: FileReport) -> AbstractContextManager[RecordEngine]:
        """Within the block, records can run. ``report`` says what is there already."""


def run_records(
    model: Model,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    layout: RecordLayout,
    base: GenerationSettings,
    options: RunOptions,
    images: ImageSources | None,  # which ones lines may show; None where chats are text alone
    note: Callable[[str], None],
    format: str | None = None,
) -> FileReport:
    target = os.fspath(target)
    options.check_target(target)
    with open_source(source, format, note=note) as opened:
        reader = make_reader(opened, layout, base, images)
        model.expect(reader, check_first_records(reader, opened, options.limit))
        more = model.identity if images is None else {**model.identity, **images.identity}
        identity = run_identity(more, layout, base, reader.dialect, options.token_ids)
        place = options.place(target, opened)
        report = FileReport(place)
        with options.open_output(place, opened, note) as output:
            try:
                part = options.part(opened, reader.prompt_text)
                report.part = part.shard.words if part else None
                _run(model, opened, output, reader, options, identity, note, part, report)
                return report
            except KeyboardInterrupt:
                raise KeyboardInterrupt(": ".join(["interrupted", *_kept(output, report)])) from None
            except Exception as error:
                for told in () if isinstance(error, FilesError) else _kept(output, report):
                    error.add_note(told)
                raise


def _kept(output: FileOutput | StreamOutput, report: FileReport) -> list[str]:
    """Where a run that is not finished has its results, if it has some."""
    if not (output.kept and report.records):  # before it has records, the results may be those of another run
        return []
    there = f"{report.before + report.written:,} of {report.records:,} results are {output.kept}"
    return [f"{there}: run the same again, and it goes on from them"]


def images_of_lines(folder: str | os.PathLike[str] | None, urls: bool, in_one_process: bool) -> ImageSources | None:
    """Which images lines may show; None where chats are text alone."""
    if in_one_process:
        return ImageSources(folder, urls)
    if folder is not None or urls:
        raise FilesError(
            "images are not supported on several GPUs at once so far: leave out `image_folder` and `image_urls`, or "
            "run a part of the file (`shard`) on each"
        )
    return None


def _run(
    model: Model,
    source: Source,
    output: FileOutput | StreamOutput,
    reader: RecordReader,
    options: RunOptions,
    identity: Mapping[str, Any],
    note: Callable[[str], None],
    part: Part | None,
    report: FileReport,
) -> None:
    began = time.perf_counter()
    numbers = np.arange(min(source.count, options.limit or source.count)) if part is None else part.numbers
    asked = RunRecord(dict(identity), options.seed, input=source.summary(), shard=part.summary() if part else {})
    record = output.begin(asked, numbers, source, seed=part.seed if part else None, retry_errors=options.retry_errors)
    todo = output.missing()
    report.records, report.before = len(numbers), len(numbers) - len(todo)
    report.errors_in = "response.body.error" if reader.dialect == OPENAI else "error"
    done = numbers[~np.isin(numbers, todo)]
    report.errors = int(output.is_error[done].sum())
    if options.on_error == "raise":
        _refuse_bad_records(reader, source, todo)
    with ExitStack() as opened:
        if len(todo):
            engine = opened.enter_context(model.ready(report))
            from .record_engine import fingerprint_of, tokenizer_of
            from .record_loop import RecordLoop

            output.start(engine.ask(fingerprint_of))
            writer = ResultWriter(
                reader.dialect,
                tokens=TokenTexts(engine.ask(tokenizer_of)),
                token_ids=options.token_ids,
                model=model.name,
                created=int(datetime.fromisoformat(record.created).timestamp()),
                note=note,
            )
            RecordLoop(engine, source, output, reader, writer, options, record.seed or 0, report).run_windows(todo)
        report.seconds = time.perf_counter() - began - report.loading_seconds
        output.finish(report.figures())
        report.seconds = time.perf_counter() - began - report.loading_seconds


def _refuse_bad_records(reader: RecordReader, source: Source, todo: np.ndarray) -> None:
    """Reads all records once before any is run."""
    found = (reader.read(number, raw) for number, raw in source.read(todo))
    problems = [str(record) for record in found if isinstance(record, BadPromptRecord)]
    if problems:
        raise InputFileError(listed(f"{source.name} has records that cannot be run:", problems))
