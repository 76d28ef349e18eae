"""One call of a pool: who runs which pieces, what comes of them, and what happens when a worker is lost.

Each worker is given its share at once and begins the pieces as its memory allows. A worker that has run out of work
takes over pieces that another has not begun. What a lost worker has not delivered is run by the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..notices import Notices
from ..planning.pieces import Split
from ..results.run_report import RunReport
from ..wording import counted
from .crew import Crew, WorkerHandle
from .lead import none_left
from .messages import (
    Answered,
    Died,
    Done,
    Failed,
    GivenUp,
    GiveUp,
    Progress,
    Ready,
    Results,
    Run,
    Stop,
    packed_for_worker,
)
from .work import Work

_EVENTS_EVERY = 0.5  # seconds, after which processes are looked after if nothing comes
_LAST_REPORTS = 10.0  # seconds for a worker's report, once all results are there


@dataclass
class Share:
    """What a worker has of a call."""

    pieces: set[int] = field(default_factory=set)  # that it was given, and has not ended
    ran: set[int] = field(default_factory=set)  # of which it has delivered results
    running: int = 0  # parts on their way
    asked: WorkerHandle | None = None  # who it is to take work from
    seconds: float = 0.0  # at work
    read: int = 0  # tokens of parts that are over
    written: int = 0
    read_now: int = 0  # and of the one that runs
    written_now: int = 0
    reports: list[RunReport] = field(default_factory=list)
    lost: str = ""  # why the worker is gone


class PoolCall:
    def __init__(self, number: int, crew: Crew, work: Work, split: Split, notices: Notices, strict: bool) -> None:
        """``strict``: units that do not fit are an error of the call, not of theirs alone."""
        self.number = number
        self.began = time.time()
        self._clock = time.perf_counter()
        self._ended_at: float | None = None
        self._crew = crew
        self._work = work
        self._split = split
        self._notices = notices
        self._strict = strict
        self._units = [[work.unit(place) for place in piece.prompts] for piece in split.pieces]
        self._piece_of = {unit: piece for piece, units in enumerate(self._units) for unit in units}
        self._missing = {unit: set(work.keys(unit)) for units in self._units for unit in units}
        self._costs = [split.cost(piece) for piece in range(len(self._units))]  # of what is left of each piece
        self._whole = self._cost_open = sum(self._costs)
        self._free: list[int] = []  # pieces that no worker has
        self._empty: set[WorkerHandle] = set()  # of whom nothing is to be had
        self.shares: dict[WorkerHandle, Share] = {worker: Share() for worker in crew.alive}
        self.taken_over = 0  # pieces that went from one worker to another
        for worker, pieces in zip(crew.alive, split.shares, strict=True):
            if worker.ready:
                self._give(worker, pieces)
            else:  # it takes them when it is there, if nobody else has by then
                self.shares[worker].pieces.update(pieces)

    # -- the loop ------------------------------------------------------------------------------------------------

    def results(self, watch: Callable[[], None]) -> Iterator[Any]:
        """Results as they come, in any order. ``watch`` is told now and then."""
        try:
            while self._missing:
                self._feed()
                event = self._crew.next_event(_EVENTS_EVERY)
                if event is not None:
                    yield from self._take(*event)
                watch()
            self._wait_for_reports()
        finally:
            self.stop()
            self._ended_at = time.perf_counter()

    def stop(self) -> None:
        """Whatever still runs is broken off."""
        for worker in self._crew.alive:
            if self.shares[worker].running:
                worker.send(Stop(self.number))

    def _wait_for_reports(self) -> None:
        until = time.monotonic() + _LAST_REPORTS
        while any(self.shares[worker].running for worker in self._crew.alive) and time.monotonic() < until:
            self.stop()  # it runs what another has run in the meantime
            event = self._crew.next_event(_EVENTS_EVERY)
            if event is not None:
                list(self._take(*event))

    @property
    def seconds(self) -> float:
        """Since the call began; once it has ended, that it took."""
        return (self._ended_at or time.perf_counter()) - self._clock

    @property
    def is_open(self) -> bool:
        """Whether results are missing."""
        return bool(self._missing)

    @property
    def tokens(self) -> tuple[int, int]:
        """Of prompts and of answers, that have been run."""
        shares = self.shares.values()
        return sum(each.read + each.read_now for each in shares), sum(
            each.written + each.written_now for each in shares
        )

    @property
    def share_done(self) -> float:
        """Of the whole cost, as far as results have come."""
        return 1 - self._cost_open / self._whole if self._whole else 1.0

    # -- what comes in -------------------------------------------------------------------------------------------

    def _take(self, worker: WorkerHandle, message: Any) -> Iterator[Any]:
        if isinstance(message, Died):
            self._without(worker, message.why)
        elif isinstance(message, Ready):
            self._joins(worker)
        elif isinstance(message, Answered) or getattr(message, "call", self.number) != self.number:
            self._of_an_earlier_call(worker, message)
        elif isinstance(message, Results):
            yield from self._collect(worker, message.results)
        elif isinstance(message, Progress):
            share = self.shares[worker]
            share.read_now, share.written_now = message.read, message.written
        elif isinstance(message, GivenUp):
            self._hand_over(worker, message.pieces)
        elif isinstance(message, Done):
            self._ended(worker, message)
        elif isinstance(message, Failed) and not message.fatal:
            raise message.error

    def _of_an_earlier_call(self, worker: WorkerHandle, message: Any) -> None:
        if isinstance(message, Done | Failed):
            worker.at_work = bool(self.shares[worker].running)

    def _collect(self, worker: WorkerHandle, results: Sequence[Any]) -> Iterator[Any]:
        for result in results:
            key = self._work.key(result)
            unit = self._work.unit_of(key)
            missing = self._missing.get(unit)
            if missing is None or key not in missing:
                continue  # a worker that was lost had delivered it
            self.shares[worker].ran.add(self._piece_of[unit])
            missing.remove(key)
            if not missing:
                self._close(unit)
            yield self._work.whole(result)

    def _ended(self, worker: WorkerHandle, message: Done) -> None:
        share = self.shares[worker]
        share.running -= 1
        worker.at_work = bool(share.running)
        share.seconds += message.seconds
        share.read, share.written = share.read + message.read, share.written + message.written
        share.read_now = share.written_now = 0
        if message.report is not None:
            share.reports.append(message.report)
        if message.problems:
            self._work.problems.update(message.problems)
            if self._strict:
                raise self._work.error()
            for unit in self._work.problem_units(message.problems):
                self._close(unit)
        if not share.running:
            # A piece that was not run to its end, for whatever reason, is anybody's.
            self._free += [piece for piece in sorted(share.pieces) if self._is_open(piece)]
            share.pieces.clear()

    def _is_open(self, piece: int) -> bool:
        return any(unit in self._missing for unit in self._units[piece])

    # -- who runs what -------------------------------------------------------------------------------------------

    def _give(self, worker: WorkerHandle, pieces: Sequence[int]) -> None:
        units = {piece: [unit for unit in self._units[piece] if unit in self._missing] for piece in pieces}
        units = {piece: some for piece, some in units.items() if some}
        if not units:
            return
        share = self.shares[worker]
        share.pieces.update(units)
        part = self._work.part(sorted(unit for some in units.values() for unit in some))
        message = Run(self.number, part, units, self.began)
        worker.post(packed_for_worker(message, "an option of this call"))
        share.running += 1
        worker.at_work = True
        worker.moved = time.monotonic()
        self._empty.discard(worker)

    def _feed(self) -> None:
        """Work for those who have none."""
        idle = [
            worker
            for worker in self._crew.alive
            if worker.ready and not worker.at_work and self.shares[worker].asked is None
        ]
        if not self._crew.alive:
            raise none_left(self._crew)
        for left, worker in zip(range(len(idle), 0, -1), idle, strict=True):
            if self._free:
                count = -(-len(self._free) // left)
                pieces, self._free = self._free[:count], self._free[count:]
                self._give(worker, pieces)
            else:
                self._ask_another(worker)

    def _ask_another(self, worker: WorkerHandle) -> None:
        """Look for pieces that another has not begun, as far as can be told from here."""
        asked = {share.asked for share in self.shares.values()}
        others = [each for each in self._crew.alive if each is not worker and each not in asked | self._empty]
        waiting = {each: self._waiting(each) for each in others}
        costs = {each: sum(map(self._split.cost, pieces)) for each, pieces in waiting.items()}
        other = max(others, key=costs.__getitem__, default=None)
        if other is None or not waiting[other]:
            return
        wanted = self._half(waiting[other], self._cost_left(other))
        if not wanted:
            self._empty.add(other)
            return
        if not other.ready:  # it is still loading
            self.shares[other].pieces.difference_update(wanted)
            self.taken_over += len(wanted)
            self._give(worker, wanted)
            return
        self.shares[worker].asked = other
        other.send(GiveUp(self.number, wanted))

    def _waiting(self, worker: WorkerHandle) -> list[int]:
        share = self.shares[worker]
        return [piece for piece in sorted(share.pieces - share.ran) if self._is_open(piece)]

    def _cost_left(self, worker: WorkerHandle) -> float:
        """Of what a worker has yet to do, begun or not."""
        return sum(self._costs[piece] for piece in self.shares[worker].pieces)

    def _close(self, unit: int) -> None:
        """It has all of its results, or will never have them."""
        if self._missing.pop(unit, None) is not None:
            piece = self._piece_of[unit]
            cost = self._split.cost(piece) / len(self._units[piece])
            self._costs[piece] -= cost
            self._cost_open -= cost

    def _half(self, pieces: Sequence[int], left: float) -> list[int]:
        """Of the pieces that come last, as many as take another worker no longer than the rest takes this one.

        The other has to compute what they have in common with the rest once more. ``left``: of all that this one has.
        """
        wanted: list[int] = []
        above: set[int] = set()
        taken = 0.0
        for number in reversed(pieces):
            piece = self._split.pieces[number]
            more = piece.own + sum(self._split.segment_costs[each] for each in piece.above if each not in above)
            if taken + more > left - piece.own:
                break
            wanted.append(number)
            above.update(piece.above)
            taken, left = taken + more, left - piece.own
        return wanted

    def _hand_over(self, worker: WorkerHandle, pieces: Sequence[int]) -> None:
        self.shares[worker].pieces.difference_update(pieces)
        self.taken_over += len(pieces)
        if not pieces:
            self._empty.add(worker)
        taker = next((each for each, share in self.shares.items() if share.asked is worker), None)
        if taker is not None:
            self.shares[taker].asked = None
        if taker is not None and not taker.dead and not taker.at_work:
            self._give(taker, pieces)
        else:
            self._free += pieces

    def _joins(self, worker: WorkerHandle) -> None:
        share = self.shares[worker]
        pieces, share.pieces = sorted(share.pieces), set()
        self._give(worker, pieces)

    def _without(self, worker: WorkerHandle, why: str) -> None:
        share = self.shares[worker]
        open_pieces = [piece for piece in sorted(share.pieces) if self._is_open(piece)]
        share.pieces.clear()
        share.running = 0
        self._free += open_pieces
        for each in self.shares.values():
            if each.asked is worker:
                each.asked = None
        self._empty.clear()
        share.lost = why
        prompts = sum(unit in self._missing for piece in open_pieces for unit in self._units[piece])
        if self._crew.alive:
            others = f"the other {len(self._crew.alive)}" if len(self._crew.alive) > 1 else "the other one"
            went_on = f"its {counted(prompts, 'prompt')} go to {others}" if prompts else "it had no work"
            self._notices(f"lost {worker.number}", f"{worker.name} {why}: {went_on}")
