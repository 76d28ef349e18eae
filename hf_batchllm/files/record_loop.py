"""From the records of a file to their results: windows, calls of the generator, lines of the output.

Each result is written as soon as it is there. It depends on the record, the record's number and the run's seed alone,
so a run that was stopped anywhere and continued gives the same results as a run in one go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from ..engine.progress import WholeRun, whole_run
from ..errors import InputFileError, NothingToDrawError, PromptError
from ..inputs.chats import is_chat
from ..inputs.grammar_options import as_list
from ..inputs.images.image_parts import sources_of
from ..inputs.images.image_sources import ImageSources
from ..inputs.preparing import bars_shown, bars_wanted
from ..inputs.prompt_options import as_lists
from ..results.generations import Generation
from .output import FileOutput
from .record_engine import LineConfig, RecordEngine
from .records import BadPromptRecord, PromptRecord, RecordReader, listed
from .report import FileReport
from .results import ResultWriter
from .run_options import RunOptions
from .sources import Source
from .streams import StreamOutput

ROOM = 16  # bytes of pixels in memory together, for each byte of records
_BYTES_OF_A_PIXEL = 24  # as the processors of Qwen's models make it, twice in float32; others make less
_MIN_RECORDS_WITH_BAR = 32  # fewer records show a progress bar only if asked to
_MIN_LOGPROBS = 20  # of each token: the most that OpenAI's interface returns
_MOST_FAILING_ALONE = 8  # records whose scores are no numbers, before a run without any good result is given up


@dataclass
class RecordLoop:
    engine: RecordEngine
    source: Source
    output: FileOutput | StreamOutput
    reader: RecordReader
    writer: ResultWriter
    options: RunOptions
    seed: int
    report: FileReport

    def __post_init__(self) -> None:
        self._context = self.engine.facts.context
        self._whole: WholeRun | None = None
        self._failed_alone = 0  # records, before the first good result

    def run_windows(self, todo: np.ndarray) -> None:
        """``todo``: the numbers of the records to run."""
        shown = bars_shown(self.options.progress, len(todo) >= _MIN_RECORDS_WITH_BAR)
        with whole_run(self.report.records, self.report.before, shown) as self._whole, bars_wanted(shown):
            for window in self.source.windows(todo, self.options.window_bytes, self.reader.prompt_text):
                self._run_window(window)
        self._whole = None

    def _run_window(self, numbers: np.ndarray) -> None:
        calls: dict[tuple[int, ...], list[PromptRecord]] = {}
        for number, raw in self.source.read(numbers):
            record = self.reader.read(number, raw)
            if isinstance(record, BadPromptRecord):
                self._write_error(record)
                continue
            settings = record.settings
            resolved = self.engine.resolved(settings)
            if isinstance(resolved, str):
                self._write_error(record.bad(self.reader.why(raw, settings, resolved)))
                continue
            # The model's own config may ask for beams, too. All records of a call get as many log-probabilities as the
            # record that asks for most.
            call_key = resolved.beams > 1, *settings.call_key, max(settings.logprobs or 0, _MIN_LOGPROBS)
            calls.setdefault(call_key, []).append(record)
        room = ROOM * self.options.window_bytes
        for records in calls.values():
            for some in in_calls(records, self.reader.images, room, lambda: self.engine.most_of_an_image):
                self._run_call(some)

    def _run_call(self, records: Sequence[PromptRecord]) -> None:
        assert self._whole is not None
        self._whole.call_begins(len(records))
        settings = [record.settings for record in records]
        options = as_lists([each.prompt_options for each in settings]) | as_list([each.grammar for each in settings])
        if settings[0].adapter is not None:
            options["adapter"] = [each.adapter for each in settings]
        wanted = [each.logprobs for each in settings if each.logprobs is not None]
        if wanted:
            options["logprobs"] = max(wanted)
        left = dict(enumerate(records))  # those without a result
        waiting: dict[int, list[Generation]] = {}  # place in ``records`` -> its samples so far
        # All of them are: records with problems are written, and not run.
        configs = [found for found in map(self.engine.resolved, settings) if isinstance(found, LineConfig)]
        try:
            stream = self.engine.stream(
                [record.prompt for record in records],
                [record.where for record in records],
                [each.config for each in configs],
                seed=[self._seed_of(record) for record in records],
                on_error=self.options.on_error,
                progress=not self._whole.bar.disable,
                **options,
            )
            with closing(stream) as generations:
                for generation in generations:
                    place = generation.index
                    samples = waiting.setdefault(place, [])
                    samples.append(generation)
                    if len(samples) == configs[place].samples:
                        del waiting[place]
                        self._write_result(left.pop(place), sorted(samples, key=lambda sample: sample.sample))
        except NothingToDrawError as error:
            # One record's settings broke the call off: the others of the call must not suffer.
            self._without(error, list(left.values()))
        except PromptError as error:
            problems = [f"{records[place].where}: the prompt {why}" for place, why in error.problems.items()]
            raise InputFileError(listed(f"{self.source.name} has prompts that cannot be run:", problems)) from error
        self.report.add(self.engine.last_report)

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
            self._write_error(record.bad(str(error)))

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
        self._append(record.number, self.writer.result(record, self.source.key(record.number), samples, warning))

    def _beyond_context(self, samples: Sequence[Generation]) -> str | None:
        tokens = max(len(sample.prompt_token_ids) + len(sample.token_ids) for sample in samples)
        if self._context is None or tokens - 1 <= self._context:  # the last token is never run
            return None
        return f"prompt and answer have {tokens:,} tokens, more than the {self._context:,} that the model was made for"

    def _write_error(self, record: BadPromptRecord) -> None:
        if self.options.on_error == "raise":
            raise InputFileError(f"{self.source.name}, {record}")
        self.report.errors += 1
        self._append(record.number, self.writer.error(record, self.source.key(record.number)))

    def _append(self, number: int, line: bytes) -> None:
        self.output.append([(number, line)])
        self.report.written += 1
        if self._whole is not None:
            self._whole.done += 1


def in_calls(
    records: Sequence[PromptRecord],
    images: ImageSources | None,  # which they may show
    room: int,  # bytes of pixels
    most_of_one: Callable[[], int],  # bytes that are made of an image, however large it is; 0 if that is not known
) -> Iterator[Sequence[PromptRecord]]:
    """Records in several calls, where the pixels of their images do not fit into memory together.

    A call has the pixels of all its images in memory, and a line that names an image is short. Records that show the
    same image first stand together; otherwise their order is kept.
    """
    shown = [dict.fromkeys(sources_of(record.prompt)) if is_chat(record.prompt) else {} for record in records]
    costs = {source: _BYTES_OF_A_PIXEL * images.pixels(source) for each in shown for source in each} if images else {}
    if sum(costs.values()) > room:
        most = most_of_one()
        costs = {source: min(cost, most or cost) for source, cost in costs.items()}
    if sum(costs.values()) <= room:
        yield records
        return
    first: dict[str | bytes, int] = {}  # image -> the first record that begins with it
    seats = [first.setdefault(next(iter(each)), place) if each else place for place, each in enumerate(shown)]
    call: list[PromptRecord] = []
    of_call: set[str | bytes] = set()
    for place in sorted(range(len(records)), key=seats.__getitem__):
        together = of_call | shown[place].keys()
        if call and together > of_call and sum(costs[source] for source in together) > room:
            yield call
            call, together = [], set(shown[place])
        call.append(records[place])
        of_call = together
    yield call
