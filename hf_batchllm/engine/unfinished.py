"""What had finished when an error or an interrupt broke a call off: it goes to the caller, with the error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from ..errors import GenerationInterrupted
from ..results.generations import BatchResult, Generation
from ..results.run_report import RunReport
from ..results.scores import Score, ScoreResult
from .scoring.score_inputs import ScoreInputs
from .tracebacks import without_frames

R = TypeVar("R")
Decode = Callable[[list[int]], str | None]

_HAD_FINISHED = "results had finished"


class Finished(ABC, Generic[R]):
    """The results of a call so far. ``report``: None until the first step, and while steps run."""

    def __init__(self) -> None:
        self.results: dict[tuple[int, int], R] = {}  # by prompt and sample, or by context and choice
        self.report: RunReport | None = None
        self.expected = 0  # results of the whole call
        self.index: Any = None  # of the pandas Series that the call was given

    @abstractmethod
    def part(self, decode: Decode) -> BatchResult | ScoreResult:
        """What there is of the call's result."""


class FinishedGenerations(Finished[Generation]):
    def part(self, decode: Decode) -> BatchResult:
        part = BatchResult(with_texts([self.results[key] for key in sorted(self.results)], decode), self.report, decode)
        part._index = self.index
        return part


def with_texts(rows: Iterable[Generation], decode: Decode) -> list[Generation]:
    """Where a call gives tensors, or the caller decodes by itself, rows come without."""
    return [row if row.text is not None else _with_text(row, decode) for row in rows]


def _with_text(row: Generation, decode: Decode) -> Generation:
    with suppress(Exception):  # of a user's tokenizer; another error is on its way
        return replace(row, text=decode(row.token_ids))
    return row


class FinishedScores(Finished[Score]):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = ScoreInputs()  # what the call was asked for

    def part(self, decode: Decode) -> ScoreResult:
        cut_short = {place[0] for place in self.inputs.places() if place not in self.results}
        part = ScoreResult(list(self.results.values()), self.report, complete=False, cut_short=cut_short)
        part._index = self.index
        return part


def note_of(finished: int, expected: int, at_hand: bool) -> str:
    """What an error says of the results. ``at_hand``: whether the caller holds the generator."""
    where = "error.result and in gen.interrupted" if at_hand else "error.result"
    return (
        f"{finished:,} of {expected:,} {_HAD_FINISHED}: they are in {where}, not aligned with the prompts: use `.index`"
    )


def attach(error: BaseException, part: BatchResult | ScoreResult, note: str) -> None:
    """Put the finished part into ``error.result``, and a note that says so, if anything had finished.

    The error goes on as it is: it may be of any class. A ``result`` of its own stays.
    """
    with suppress(Exception):  # its class may do anything
        if not hasattr(error, "result") or part_of(error) is not None:
            error.result = part  # type: ignore[attr-defined]
    if part_of(error) is not part:
        note = note.replace("error.result and in ", "")
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):  # the same object may have come out of an earlier call, or out of one within this
        notes[:] = [each for each in notes if _HAD_FINISHED not in str(each)]
    if len(part):
        with suppress(Exception):
            error.add_note(note)


def part_of(error: BaseException) -> BatchResult | ScoreResult | None:
    """What ``attach`` has put into an error."""
    part = None
    with suppress(Exception):
        part = getattr(error, "result", None)
    return part if isinstance(part, BatchResult | ScoreResult) else None


class KeepsResults(Protocol):
    """A generator, as far as a call that was broken off is concerned."""

    interrupted: BatchResult | ScoreResult | None
    last_report: RunReport | None


@contextmanager
def results_kept(owner: KeepsResults, finished: Callable[[], Finished[Any]], decode: Decode) -> Iterator[None]:
    """Around a call: after an interrupt or an error, its ``owner`` has what had finished, and so has the error."""
    owner.last_report = None
    try:
        yield
    except KeyboardInterrupt as interrupt:
        without_frames(interrupt)  # the error that follows keeps it
        part = finished().part(decode)
        if finished().expected:  # else the call had not begun, and what an earlier one left stays
            owner.interrupted = part
        raise GenerationInterrupted(part, len(finished().results), finished().expected) from None
    except Exception as error:
        if finished().expected:
            owner.interrupted = None
        if finished().results:
            owner.interrupted = finished().part(decode)
            attach(error, owner.interrupted, note_of(len(finished().results), finished().expected, at_hand=True))
        raise
    owner.interrupted = None
