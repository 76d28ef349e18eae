"""What comes of a step in a call that guesses tokens: those that count, and what is learned of guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from ...model.device_memory import is_out_of_memory
from ...planning.requests_and_prefixes import Request
from ...planning.step import Chunk, Step
from ..flight import Flight
from ..timekeeper import Timekeeper
from .drafts import Drafts


class Loop(Protocol):
    """What the engine's loop is here."""

    idle_tokens: int
    timekeeper: Timekeeper

    def collect(self, flight: Flight, tokens: np.ndarray) -> list[Request]:
        """Give each request its tokens. Gives those that end with them."""

    def may_repeat(self, requests: Sequence[Request]) -> bool:
        """Whether their tokens may be picked once more, after a pick that failed."""


def collect_drafted(engine: Loop, drafts: Drafts, flight: Flight, tokens: np.ndarray) -> tuple[list[Request], int]:
    """Give each request its tokens. Gives those that end, and how many tokens came of guesses."""
    if flight.step.in_rows:
        finished, accepted = _of_rows(engine, drafts, flight, tokens)
    else:
        drafts.before(flight.step)
        finished = engine.collect(flight, tokens)
        accepted = _picked_one_by_one(engine, drafts, flight, finished)
    for request in finished:
        drafts.finished(request)
    drafts.ran(flight.step, flight.began, flight.launched, len(flight.step.rows) + accepted, flight.steady)
    return finished, accepted


def _of_rows(engine: Loop, drafts: Drafts, flight: Flight, tokens: np.ndarray) -> tuple[list[Request], int]:
    """``tokens`` [samples, most]: the device has drawn one in each row, and those that count are not negative."""
    sampling = flight.sampling
    counts = np.maximum((tokens >= 0).sum(axis=1), 1).tolist()
    for request, count in zip(sampling, counts, strict=True):
        if count > 1:
            request.computed += count - 1
            request.expect(count - 1)
    count_of = dict(zip(sampling, counts, strict=True))
    for chunk in flight.step.drafts:
        assert isinstance(chunk.unit, Request)
        drafts.seen(chunk.unit, len(chunk.draft), count_of[chunk.unit] - 1)
    before = sum(len(request.generated) for request in sampling)
    idle = engine.idle_tokens
    several = Step(flight.step.rows, times=tokens.shape[1])
    finished = engine.collect(replace(flight, step=several, counts=counts), tokens)
    engine.idle_tokens = idle  # right guesses behind an answer's end count as wrong ones
    accepted = sum(len(request.generated) for request in sampling) - before - len(sampling)
    drafts.accepted += accepted
    return finished, accepted


def _picked_one_by_one(engine: Loop, drafts: Drafts, flight: Flight, finished: list[Request]) -> int:
    """Go on with requests whose guesses are right, as if each had been a step. Gives how many tokens they get.

    ``finished``: those that the step itself has ended; the others that end are added.
    """
    first: dict[Chunk, int] = {}  # the row of each draft's first token
    rows = 0
    for chunk in flight.step.chunks:
        if chunk.draft:
            first[chunk] = rows
            rows += len(chunk.draft)
    if not first:
        return 0
    assert drafts.pick is not None
    right = dict.fromkeys(first, 0)
    going, place = list(first), 0
    while going := [chunk for chunk in going if _is_right(chunk, place)]:
        requests = [chunk.unit for chunk in going if isinstance(chunk.unit, Request)]
        engine.timekeeper.switch("tokens")
        try:
            tokens = drafts.pick([first[chunk] + place for chunk in going], requests)
        except Exception as error:
            if is_out_of_memory(error) and engine.may_repeat(requests):
                break  # these tokens are run again
            raise
        for request in requests:
            request.computed += 1
            request.expect()
        once_more = replace(flight, step=Step(requests), sampling=requests, counts=[1] * len(requests))
        finished += engine.collect(once_more, tokens)
        drafts.accepted += len(going)
        for chunk in going:
            right[chunk] += 1
        place += 1
    for chunk, count in right.items():
        assert isinstance(chunk.unit, Request)
        drafts.seen(chunk.unit, len(chunk.draft), count)
    return sum(right.values())


def _is_right(chunk: Chunk, place: int) -> bool:
    """Whether the token at this place of a draft is the one that its request has got there, and its latest."""
    request, drawn_at = chunk.unit, chunk.end - len(chunk.draft) + place
    assert isinstance(request, Request)
    return (
        place < len(chunk.draft)
        and not request.done
        and request.length == drawn_at + 1
        and request.generated[-1] == chunk.draft[place]
    )
