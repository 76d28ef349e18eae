"""Drafts on a GPU, where steps run ahead of the host.

A guess goes on from tokens that the host has seen, so steps with drafts run one at a time, and the device waits for the
host in between. That pays where many guesses are right. How many would be is known without trying: what a burst of
steps gives is held against a guess that is made before it is seen. How long the device takes for so many rows, and the
host between two steps, is measured all along; the way of running that gives more tokens a second goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...planning.draft_room import DraftRoom
from ...planning.requests_and_prefixes import Request
from ...planning.step import Chunk, Step
from ..cost import StepSeconds
from ..device_loop.graph_sizes import DRAFT_SIZES, draft_size_of, size_of
from .drafts import Drafts, draft_of, first_of
from .kept_room import KeptRoom

_LOOKED_AT = 16  # rows of a burst whose tokens are held against guesses
_BURSTS = 3  # that must have been measured before
_LATEST = 0.3  # how much the latest gap counts
_LONGEST_GAP = 3.0  # times the known one: the caller may have had control meanwhile
_FORGOTTEN = 0.03  # how much nearer to the first guess a burst brings what is known of gaps
# A gap before one has been measured: a part of what it takes to get a burst ready, and so many seconds, also of a row.
_FIRST_GAP_IN_READY, _FIRST_GAP, _FIRST_GAP_OF_ROW = 0.6, 3e-4, 1.5e-5
_MARGIN = 1.1  # drafts begin where so many times as many tokens a second are expected
_ENOUGH = 0.95  # and they end where less than that is expected: what is known of guesses is vague
_TRIED = 16  # steps with drafts, after which they must be faster
_KEPT = 0.94  # how much the steps before the latest count
_PAUSE, _LONGEST_PAUSE = 8, 256  # bursts without drafts after some that were slower
_BURSTS_FOR_GRAPHS = 12  # in which graphs for steps with drafts may be captured before the first such step
_IDLE = 5  # steps on end without a guess, after which drafts end
_SETTLED = 8  # steps in a room until it is asked again what pays
_CAPTURE = 0.1  # seconds for a graph
_TOO_SMALL = 50  # steps for which a graph of another size would have been better by far, before it is captured


class DraftsAhead(Drafts):
    """Each token of a draft is a row of its own, and the device draws the tokens of all rows.

    ready: given the sizes of steps to come, says whether there is nothing to wait for before they begin.
    share: as ``StepSeconds`` has it. has_rooms: whether batches are made for rooms.
    """

    largest_step = DRAFT_SIZES[-1]
    learns_beside = True

    def __init__(
        self,
        *given: Any,
        ready: Callable[[Sequence[int]], bool] = lambda _: True,
        share: float = 0.0,
        has_rooms: bool = True,
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        self._has_rooms = has_rooms
        self._ready_for = ready
        self._waited = 0  # bursts, for graphs
        self._spent = 0.0  # seconds in which the device made the guesses of the latest step
        self.must_know = False  # the next step has drafts, if any pays
        self._rooms = KeptRoom(self._most, self._lengthen)
        self._too_small = 0  # steps
        self._asked = False  # whether there was a guess, and it was asked whether it pays
        self._room: DraftRoom | None = None  # in which the next step can run
        self._idle = 0  # steps on end in which nothing was guessed
        self._settled = 0  # steps since it was last asked what pays
        self._foreseen: dict[Request, tuple[int, list[int]]] = {}  # tokens so far, and what would have been guessed
        self._device = StepSeconds(share)
        self._read = 0  # tokens whose K and V the latest step read
        self._looked = 0  # how often
        self._bursts = 0  # measured since prompts ran
        self._gap: float | None = None  # seconds in which the device waits for the host between two steps
        self._ready: float | None = None  # seconds in which the host gets a burst ready
        self._steps = 0  # since drafts began
        # Of these steps, the latest of them above all; and what their tokens would have taken without drafts.
        self._seconds = self._otherwise = 0.0
        self._pause, self._waits = _PAUSE, 0
        self._latest = 0.0  # when tokens were seen last
        self._unnoted: list[tuple[Request, int, int]] = []  # what ``seen`` was told, until the host has time

    def added(self, step: Step) -> Step:
        if not self.must_know:
            return step
        self._read = _read_by(step.rows)
        room = self._room = None if step.chunks else self._rooms.of(step.rows)
        self._asked = False
        drafted = self._drafted(step)
        self._idle = self._idle + 1 if drafted is step else 0
        if drafted is not step:
            return drafted
        if room is None or not self._may_go_on:  # prompts have come in between, or no guess pays
            self._end()
            return step
        return Step(step.rows, copies=step.copies, room=room)

    @property
    def _may_go_on(self) -> bool:
        """Where nothing is guessed this time, and soon something may be."""
        return not self._asked and self._idle <= _IDLE

    def _with(self, step: Step, drafts: dict[Request, list[int]]) -> Step:
        if not self._has_rooms:
            chunks = self._chunks(drafts)
            return Step(step.rows, copies=step.copies, drafts=chunks) if chunks else step
        room = self._room
        if room is None or not self._settled:
            room = self._rooms.next(step.rows, drafts, self._rate, self._most_tokens)
        chunks = _chunks_in(room, drafts)
        if not chunks and room is self._room:  # none of these answers has more than a row in it
            self._rooms.end()
            room = self._rooms.next(step.rows, drafts, self._rate, self._most_tokens)
            chunks = _chunks_in(room, drafts)
        return Step(step.rows, copies=step.copies, drafts=chunks, room=room) if chunks else step

    def launched(self, step: Step) -> None:
        if not step.in_rows:  # a request may lose its pages, and come back with others
            self._rooms.end()
        unnoted, self._unnoted = self._unnoted, []
        for request, guessed, accepted in unnoted:
            if not request.done:
                super().seen(request, guessed, accepted)
        if step.in_rows:
            self._learn(step.rows)

    def seen(self, request: Request, guessed: int, accepted: int) -> None:
        self._unnoted.append((request, guessed, accepted))

    # -- what pays -----------------------------------------------------------------------------------------------

    def _that_pay(self, rows: int, guesses: dict[Request, list[int]]) -> dict[Request, list[int]]:
        room = self._room
        if room is not None and self._settled < _SETTLED and self._rooms.fits(room, rows, guesses, self._rate):
            self._settled += 1  # rows that are there cost nothing
            return guesses
        self._settled, self._asked = 0, True
        most_likely, speed = self._best(rows, self._chances(guesses))
        ahead = self._seconds_of(size_of(rows))
        if ahead is not None and speed * ahead <= _ENOUGH * rows:
            return {}
        counts = np.bincount(most_likely, minlength=len(guesses)).tolist()
        return first_of(guesses, dict(zip(guesses, counts, strict=True)))

    def _chances(self, guesses: dict[Request, list[int]]) -> np.ndarray:  # [requests, most]
        """That each token is right, and all before it; 0 where there is none."""
        lengths = np.array([len(guess) for guess in guesses.values()])
        rates = np.array([self._rate_of(request) for request in guesses])
        places = np.arange(1, 1 + max(lengths, default=0))
        return np.where(places <= lengths[:, None], rates[:, None] ** places, 0.0)

    def _best(self, rows: int, chances: np.ndarray) -> tuple[np.ndarray, float]:
        """The requests whose tokens are guessed, one by one, for the most tokens a second; and how many these are."""
        room = self._most_tokens - rows
        order = np.argsort(-chances, axis=None, kind="stable")[:room]
        order = order[chances.ravel()[order] > 0]
        if not len(order):
            return order, 0.0
        tokens = rows + np.cumsum(chances.ravel()[order])
        largest = self._rooms.sizes[-1]
        sizes = [*self._rooms.sizes, *(size for size in DRAFT_SIZES if size > largest)]
        step = np.searchsorted(sizes, rows + 1 + np.arange(len(order)))
        seconds = np.array([self._seconds_of(size) or 1.0 for size in sizes])[step]
        speeds = tokens / (seconds + self._expected_gap(rows))
        best = int(speeds.argmax())
        if rows < largest < rows + best + 1:  # there is no graph of that size
            within = int(speeds[: largest - rows].argmax())
            self._too_small += int(speeds[best] > _MARGIN * speeds[within])
            if self._too_small > _TOO_SMALL:  # the next step is to wait for one
                self._rooms.sizes, self._too_small = sizes[: int(step[best]) + 1], 0
            best = within
        return order[: best + 1] // chances.shape[1], float(speeds[best])

    def _expected_gap(self, rows: int) -> float:
        return self._first_gap(rows) if self._gap is None else self._gap

    def _first_gap(self, rows: int) -> float:
        return _FIRST_GAP_IN_READY * (self._ready or 0.0) + _FIRST_GAP + _FIRST_GAP_OF_ROW * rows

    def _seconds_of(self, size: int) -> float | None:
        return self._device.of(size, self._read)

    # -- what is measured ----------------------------------------------------------------------------------------

    def before(self, step: Step) -> None:
        self._foreseen.clear()
        rows = step.rows
        if self.must_know or step.chunks or not rows or 2 * len(rows) > self._most_tokens:
            return
        apart = -(-len(rows) // _LOOKED_AT)
        self._looked += 1
        for request in rows[self._looked % apart :: apart]:  # others each time
            if not request.done:
                self._learn([request])
                self._foreseen[request] = len(request.generated), self._guess(request)

    def ran(self, step: Step, began: float, launched: float, gained: int, steady: bool) -> None:
        now = time.perf_counter()
        before, self._latest = self._latest, now
        guesses = self._learned()
        if step.chunks:
            self._bursts = 0
        if step.chunks or not steady:
            return
        rows = len(step.rows)
        if step.in_rows:
            size = draft_size_of(step.tokens) if step.room is None else step.room.size
            device, known = now - max(launched, before), self._expected_gap(rows)
            self._device.note(size, device, self._read)
            gap = min(max(launched - before - self._spent, 0.0), _LONGEST_GAP * known)
            self._gap = known + _LATEST * (gap - known)
            self._check(rows, gained, device + gap)
            return
        self._bursts += 1
        ready = launched - began
        self._ready = ready if self._ready is None or ready < self._ready else self._ready + 0.1 * (ready - self._ready)
        if self._gap is not None:  # after a long one there might never be another to correct it
            self._gap += _FORGOTTEN * (self._first_gap(rows) - self._gap)
        self._read = _read_by(step.rows)
        self._device.note(size_of(rows), (now - max(launched, before)) / step.times, self._read)
        ahead = self._seconds_of(size_of(rows))
        if self.must_know or self._bursts < _BURSTS or ahead is None:
            return
        drafted, speed = self._expected(step.rows, guesses)
        if not drafted:
            return
        self._waits -= 1
        if self._waits <= 0 and speed * ahead > _MARGIN * rows and self._graphs_are_there(step, rows + drafted):
            self.must_know, self._too_small = True, 0
            self._steps, self._seconds, self._otherwise = 0, 0.0, 0.0

    def _expected(self, requests: Sequence[Request], guesses: dict[Request, list[int]]) -> tuple[int, float]:
        """With drafts: how many tokens would be guessed, and how many tokens a second come of it. guesses: of some."""
        if not guesses:
            return 0, 0.0
        chances, rows = self._chances(guesses), len(requests)
        most_likely, speed = self._best(rows, np.resize(chances, (rows, chances.shape[1])))
        return len(most_likely), speed

    def _graphs_are_there(self, step: Step, tokens: int) -> bool:
        """Captured while the device is at work on bursts: between steps with drafts it would wait.

        tokens: of a step with drafts. The fewer answers are left, the smaller the steps.
        """
        sizes = self._sizes_to_come(step.rows, tokens)
        self._waited += 1
        if not self._ready_for(sizes[::-1]) and self._waited <= _BURSTS_FOR_GRAPHS:
            return False
        self._waited, self._rooms.sizes = 0, sizes
        return True

    def _sizes_to_come(self, requests: Sequence[Request], tokens: int) -> list[int]:
        """Sizes of steps with drafts, smallest first. Small ones are worth a capture if many steps will be no larger.

        tokens: of the first.
        """
        left = sorted((request.max_new_tokens - request.made for request in requests), reverse=True)
        each = tokens / len(requests)  # rows of an answer
        gained = 1 + (each - 1) * self._rate  # tokens of an answer in a step
        sizes = [draft_size_of(tokens)]
        for size in DRAFT_SIZES[::-1]:
            answers = int(size / each)
            if size >= sizes[0] or answers >= len(left):
                continue
            steps = (left[0] - left[answers]) / gained
            larger, smaller = self._seconds_of(sizes[0]), self._seconds_of(size)
            if larger is not None and smaller is not None and steps * (larger - smaller) > _CAPTURE:
                sizes.insert(0, size)
        return sizes

    def _end(self) -> None:
        self.must_know, self._rooms.sizes, self._idle = False, DRAFT_SIZES, 0

    def _check(self, rows: int, gained: int, seconds: float) -> None:
        """A step with drafts gave so many tokens: enough, on the whole?"""
        otherwise = (self._seconds_of(size_of(rows)) or 0.0) * gained / rows
        self.saved_seconds += otherwise - seconds
        self._steps += 1
        self._seconds = _KEPT * self._seconds + seconds + self._spent
        self._otherwise = _KEPT * self._otherwise + otherwise
        if self._steps >= _TRIED and self._otherwise < self._seconds:
            self._end()
            self._waits, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        elif self._steps >= 4 * _TRIED:
            self._pause = _PAUSE

    def _learned(self) -> dict[Request, list[int]]:
        """What would have been guessed; how much of it is right counts as for a draft."""
        guesses = {}
        for request, (before, guess) in self._foreseen.items():
            got = request.generated[before:]
            some = min(len(got), len(guess))
            if some:
                right = next((at for at in range(some) if got[at] != guess[at]), some)
                super().seen(request, some, right)
            guesses[request] = guess
        self._foreseen.clear()
        return guesses


def _chunks_in(room: DraftRoom, drafts: dict[Request, list[int]]) -> list[Chunk]:
    there = {request: draft[: room.most(request)] for request, draft in drafts.items()}
    return [draft_of(request, draft) for request, draft in there.items() if draft]


def _read_by(requests: Sequence[Request]) -> int:
    """Tokens of their own; what they share is read for many at a time."""
    return sum(len(request.generated) + request.prompt_tokens - request.start for request in requests)
