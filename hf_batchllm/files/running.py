"""From the records of a file to their results: windows, calls of the generator, lines of the output.

A record's result is written as soon as it is there. What a record says, its number and the run's seed decide it, and
nothing else does: so a run that was broken off anywhere gives, taken up again, what it would have given in one go.
"""

from __future__ import annotations

import datetime
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import numpy as np
from tqdm.auto import tqdm
from transformers.utils import logging

from ..errors import InputFileError, PromptError
from ..generator import BatchGenerator
from ..results.generations import Generation
from ..results.notebook import in_notebook
from .file_report import FileReport
from .records.answers import Writer
from .records.line_configs import LineConfigs
from .records.openai_requests import in_their_words
from .records.records import BadPromptRecord, PromptRecord, Reader
from .records.token_texts import TokenTexts
from .store.outputs import open_output
from .store.run_record import RunRecord
from .store.sources import Source, record_key
from .store.streams import Output
from .weights import fingerprint

_MANY = 32  # records from which on a bar is shown unasked
_FEW_LOGPROBS = 20  # of each token: what OpenAI tells at most
_NAMED = 8  # bad records spelled out in an error


def run_records(
    gen: BatchGenerator | Callable[[], BatchGenerator],
    source: Source,
    target: str,
    *,
    reader: Reader,  # its ``base`` are the settings of the run
    seed: int | None = None,
    identity: Mapping[str, Any],  # what results depend on: a run that goes on must have the same
    model_name: str,
    output_format: str | None = None,
    token_ids: bool = False,
    order: str = "input",
    fsync: str = "5s",
    window_bytes: int = 256 << 20,
    retry_errors: bool = False,
    restart: bool = False,
    on_error: str = "record",
    limit: int | None = None,
    progress: bool | None = None,
    note: Callable[[str], None],
) -> FileReport:
    """``gen``: a generator, or what makes one, which is called if there is anything to run."""
    with ExitStack() as opened:
        output = opened.enter_context(
            open_output(target, output_format, source=source, fsync=fsync, restart=restart, note=note)
        )
        asked = RunRecord(settings=dict(identity), seed=seed)
        record = output.begin(asked, source, limit=limit, retry_errors=retry_errors)
        todo = output.missing(limit)
        report = FileReport(target, records=source.count if limit is None else min(limit, source.count))
        report.before, report.errors = report.records - len(todo), int((output.errors < report.records).sum())
        if output.complete:  # a table: its journal is gone
            report.errors = int(record.figures.get("errors") or 0)
        if on_error == "raise":
            _refuse_bad(reader, source, todo)
        if len(todo):
            generator = gen
            if not isinstance(gen, BatchGenerator):
                generator = gen()
                opened.callback(generator.close)
            output.confirm_weights(fingerprint(generator.model))
            writer = Writer(
                reader.dialect,
                tokens=TokenTexts(generator.tokenizer),
                token_ids=token_ids,
                model=model_name,
                where=source.where,
                created=int(datetime.datetime.fromisoformat(record.created).timestamp()),
                note=note,
            )
            run = _Run(generator, source, output, reader, writer, record.seed or 0, report, on_error)
            run.windows(todo, window_bytes, progress)
        if not report.left:
            output.finish(order=order, figures=report.figures())
        return report


def _refuse_bad(reader: Reader, source: Source, todo: np.ndarray) -> None:
    """All records are read once before anything is run."""
    bad, count = [], 0
    for chunk in source.chunks(todo):
        for number, raw in zip(chunk.tolist(), source.records(chunk), strict=True):
            item = reader.read(number, raw)
            if isinstance(item, BadPromptRecord):
                count += 1
                bad += [str(item)] if len(bad) < _NAMED else []
    if bad:
        more = [f"... and {count - len(bad):,} more"] if count > len(bad) else []
        raise InputFileError("\n  ".join([f"{source.name} has records that cannot be run:", *bad, *more]))


class _Run:
    def __init__(
        self,
        generator: BatchGenerator,
        source: Source,
        output: Output,
        reader: Reader,
        writer: Writer,
        seed: int,
        report: FileReport,
        on_error: str,
    ) -> None:
        self._generator = generator
        self._source = source
        self._output = output
        self._reader = reader
        self._writer = writer
        self._seed = seed
        self._report = report
        self._on_error = on_error
        self._configs = LineConfigs.of(generator)
        self._keys: dict[int, str] = {}
        self._bar: tqdm | None = None

    def windows(self, todo: np.ndarray, window_bytes: int, progress: bool | None) -> None:
        """``todo``: the numbers of the records to run."""
        windows = self._source.windows(todo, window_bytes, self._reader.prompt_text)
        first = next(windows)
        if len(first) == len(todo):  # one call: its own bar moves with every step
            wanted = len(todo) >= _MANY and logging.is_progress_bar_enabled() if progress is None else progress
            self._window(first, wanted)
            return
        show = logging.is_progress_bar_enabled() if progress is None else progress
        file = sys.stdout if in_notebook() else None  # a notebook shows stderr in red
        total, before = self._report.records, self._report.before
        with tqdm(total=total, initial=before, disable=not show, unit="lines", file=file, smoothing=0) as self._bar:
            for window in chain([first], windows):
                self._window(window, False)
        self._bar = None

    def _window(self, numbers: np.ndarray, progress: bool) -> None:
        calls: dict[tuple[int, ...], list[PromptRecord]] = {}
        for number, raw in zip(numbers.tolist(), self._source.records(numbers), strict=True):
            self._keys[number] = record_key(raw)
            item = self._reader.read(number, raw)
            if isinstance(item, BadPromptRecord):
                self._failed(item)
                continue
            why = self._configs.problem(item.settings)
            if why is not None:
                self._failed(item, why if item.request is None else in_their_words(why))
                continue
            # Beams may come from the model's own config, too.
            beams = self._configs.beams(item.settings) > 1
            # All of a call get as many log-probabilities as the one that asks for most.
            apart = beams, *item.settings.apart, max(item.settings.logprobs or 0, _FEW_LOGPROBS)
            calls.setdefault(apart, []).append(item)
        for items in calls.values():
            self._call(items, progress)
        assert not self._keys

    def _call(self, items: Sequence[PromptRecord], progress: bool) -> None:
        each = [item.settings for item in items]
        options: dict[str, Any] = {}
        if each[0].adapter is not None:
            options["adapter"] = [settings.adapter for settings in each]
        wanted = [settings.logprobs for settings in each if settings.logprobs is not None]
        if wanted:
            options["logprobs"] = max(wanted)
        waiting: dict[int, list[Generation]] = {}
        try:
            for generation in self._generator.stream(
                [item.prompt for item in items],
                [self._configs.config(settings) for settings in each],
                seed=[self._seed_of(item) for item in items],
                on_error=self._on_error,
                progress=progress,
                **options,
            ):
                place = generation.index
                samples = waiting.setdefault(place, [])
                samples.append(generation)
                if len(samples) == self._configs.samples(each[place]):
                    del waiting[place]
                    self._done(items[place], sorted(samples, key=lambda sample: sample.sample))
        except PromptError as error:
            problems = {items[index].number: why for index, why in error.problems.items()}
            named = [f"{self._source.where(number)}: the prompt {why}" for number, why in problems.items()]
            more = [f"... and {len(named) - _NAMED:,} more"] if len(named) > _NAMED else []
            lines = [f"{self._source.name} has prompts that cannot be run:", *named[:_NAMED], *more]
            raise InputFileError("\n  ".join(lines)) from error
        self._report.add(self._generator.last_report)

    def _seed_of(self, item: PromptRecord) -> int:
        """Its own, or one that the run's seed and the record's number make."""
        if item.settings.seed is not None:
            return item.settings.seed
        made = hashlib.blake2b(f"{self._seed} {item.number}".encode(), digest_size=8)
        return int.from_bytes(made.digest(), "little")

    def _done(self, item: PromptRecord, samples: Sequence[Generation]) -> None:
        self._report.errors += any(sample.error is not None for sample in samples)
        self._append(item.number, self._writer.result(item, self._keys.pop(item.number), samples))

    def _failed(self, item: PromptRecord | BadPromptRecord, why: str | None = None) -> None:
        if self._on_error == "raise":
            said = str(item) if why is None else f"{self._source.where(item.number)}: {why}"
            raise InputFileError(f"{self._source.name}, {said}")
        self._report.errors += 1
        self._append(item.number, self._writer.error(item, self._keys.pop(item.number), why))

    def _append(self, number: int, line: bytes) -> None:
        self._output.append([(number, line)])
        self._report.written += 1
        if self._bar is not None:
            self._bar.update()
