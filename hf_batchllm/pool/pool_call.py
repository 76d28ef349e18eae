"""One call of a pool: who runs which pieces, what comes of them, and what happens when a worker is lost.

Each worker has a share from the start, and is given it as soon as it is free. It begins the pieces as its memory
allows. A worker that has run out of work takes over pieces that another has not begun. What a lost worker has not
delivered is run by the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..notices import Notices
from ..planning.pieces import Split
from ..wording import counted
from .crew import Crew
from .messages import Blame, Died, Done, Failed, GivenUp, GiveUp, Parcel, Progress, Run, Stop
from .share import Share
from .work import Work, key_of
from .worker_handle import WorkerHandle

_LAST_REPORTS = 10.0  # seconds for a worker's report, once all results are there
_MOST_DEVICES = 2  # that a piece may cost


class PoolCall:
    def __init__(
        self,
        crew: Crew,
        workers: Sequence[WorkerHandle],  # that have a share each
        work: Work,
        split: Split,
        notices: Notices,
        strict: bool,  # units that do not fit are an error of the call, not of theirs alone
    ) -> None:
        self.number = next(crew.numbers)
        self.began = time.time()
        self._clock = time.perf_counter()
        self._ended_at: float | None = None
        self._crew = crew
        self._work = work
        self._split = split
        self._notices = notices
        self._strict = strict
        self._units = [piece.prompts for piece in split.pieces]
        self._piece_of = {unit: piece for piece, units in enumerate(self._units) for unit in units}
        self._missing = {unit: set(keys) for unit, keys in enumerate(work.keys)}
        self._costs = [split.cost(piece) for piece in range(len(self._units))]  # of what is left of each piece
        self._whole = self._cost_open = sum(self._costs)
        self._devices_lost = [0] * len(self._units)  # over each piece
        self._free: list[int] = []  # pieces that no worker has
        self._empty: set[WorkerHandle] = set()  # of whom nothing is to be had
        self._last_error: BaseException | None = None
        self.shares = {worker: Share(set(pieces)) for worker, pieces in zip(workers, split.shares, strict=True)}

    # -- the loop ------------------------------------------------------------------------------------------------

    def results(self, watch: Callable[[], None]) -> Iterator[Any]:
        """Results as they come, in any order. ``watch`` is told now and then."""
        try:
            while self._missing:
                self._feed()
                event = self._crew.next_event()
                if event is not None:
                    yield from self._take(*event)
                watch()
            self._wait_for_reports()
        finally:
            self.stop()
            for share in self.shares.values():
                share.end_part()
            self._ended_at = time.perf_counter()

    def stop(self) -> None:
        """Whatever still runs is broken off."""
        for worker, share in self.shares.items():
            if share.began is not None and not worker.dead:
                worker.tell(Stop(self.number))

    def _wait_for_reports(self) -> None:
        until = time.monotonic() + _LAST_REPORTS
        self.stop()  # it runs what another has run in the meantime
        while time.monotonic() < until and any(
            share.began is not None and not worker.dead for worker, share in self.shares.items()
        ):
            event = self._crew.next_event()
            if event is not None:
                list(self._take(*event))

    # -- how far it is -------------------------------------------------------------------------------------------

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
        read = sum(each.read + each.read_now for each in shares)
        return read, sum(each.written + each.written_now for each in shares)

    @property
    def share_done(self) -> float:
        """Of the whole cost, as far as results have come."""
        return 1 - self._cost_open / self._whole if self._whole else 1.0

    # -- what comes in -------------------------------------------------------------------------------------------

    def _take(self, worker: WorkerHandle, message: Any) -> Iterator[Any]:
        if worker not in self.shares:
            pass  # it was lost before this call
        elif isinstance(message, Died):
            self._without(worker, message.why)
        elif getattr(message, "call", None) != self.number:
            pass  # of an earlier call, or of none
        elif isinstance(message, Progress):
            share = self.shares[worker]
            share.read_now, share.written_now = message.read, message.written
            if message.problems:
                self._set_aside(message.problems)
            yield from self._collect(share, message.results)
        elif isinstance(message, GivenUp):
            self._hand_over(worker, message.pieces)
        elif isinstance(message, Done):
            self.shares[worker].end_part(message.report, message.seconds)
            self._release(self.shares[worker])
        elif isinstance(message, Failed):
            self._failed(worker, message)

    def _collect(self, share: Share, results: Sequence[Any]) -> Iterator[Any]:
        for result in results:
            key = key_of(result)
            unit = self._work.unit_of[key]
            missing = self._missing.get(unit)
            if missing is None or key not in missing:
                continue  # a worker that was lost had delivered it
            share.ran.add(self._piece_of[unit])
            missing.remove(key)
            if not missing:
                self._close(unit)
            yield self._work.whole(result)

    def _close(self, unit: int) -> None:
        """It has all of its results, or will never have them."""
        if self._missing.pop(unit, None) is not None:
            piece = self._piece_of[unit]
            cost = self._split.cost(piece) / len(self._units[piece])
            self._costs[piece] -= cost
            self._cost_open -= cost

    def _set_aside(self, problems: dict[Any, str]) -> None:
        """Units that do not fit into a worker's memory."""
        self._work.problems.update(problems)
        if self._strict:
            raise self._work.error()
        for unit in self._work.units_with(problems):
            self._close(unit)

    def _failed(self, worker: WorkerHandle, message: Failed) -> None:
        error = message.opened()
        if message.blame is Blame.USERS:
            raise error
        self._last_error = error
        share = self.shares[worker]
        if message.blame is Blame.DEVICE:
            for piece in share.ran & share.pieces:
                self._devices_lost[piece] += self._is_open(piece)
            if max(self._devices_lost, default=0) >= _MOST_DEVICES:
                raise error
            return  # the worker ends
        share.end_part()
        share.out = f"ran out of memory ({message.text[:300]})"
        self._tell_of(worker, share.out, self._release(share))

    def _release(self, share: Share) -> int:
        """What is left of a worker's pieces is anybody's. Gives the number of prompts."""
        left = [piece for piece in sorted(share.pieces) if self._is_open(piece)]
        share.pieces.clear()
        self._free += left
        return sum(unit in self._missing for piece in left for unit in self._units[piece])

    def _is_open(self, piece: int) -> bool:
        return any(unit in self._missing for unit in self._units[piece])

    # -- who runs what -------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Work for those who have none."""
        here = [worker for worker, share in self.shares.items() if not share.out and not worker.dead]
        if not here:
            raise self._last_error if self._crew.alive and self._last_error is not None else self._crew.none_left()
        idle = []
        for worker in here:
            share = self.shares[worker]
            if not worker.free or share.began is not None or share.asked is not None:
                continue
            self._give(worker, share.pieces)
            if share.began is None:
                idle.append(worker)
        for left, worker in zip(range(len(idle), 0, -1), idle, strict=True):
            if self._free:
                count = -(-len(self._free) // left)
                pieces, self._free = self._free[:count], self._free[count:]
                self._give(worker, pieces)
            else:
                self._ask_another(worker)

    def _give(self, worker: WorkerHandle, pieces: Iterable[int]) -> None:
        """These are all that it has. Nothing is to run where all of their results have come."""
        share = self.shares[worker]
        share.pieces = {piece for piece in pieces if self._is_open(piece)}
        units = sorted(unit for piece in share.pieces for unit in self._units[piece] if unit in self._missing)
        if not units:
            return
        part = self._work.part(units)
        piece_of = dict(zip(part.numbers, map(self._piece_of.__getitem__, units), strict=True))
        message = Run(self.number, Parcel.of(part, "an option of this call"), piece_of, self.began)
        share.began = time.perf_counter()
        worker.begin(message)
        self._empty.discard(worker)

    def _ask_another(self, worker: WorkerHandle) -> None:
        """Look for pieces that another has not begun, as far as can be told from here."""
        asked = {share.asked for share in self.shares.values()}
        others = [each for each in self.shares if each is not worker and not each.dead]
        others = [each for each in others if each not in asked and each not in self._empty]
        unbegun = {each: self._unbegun(each) for each in others}
        costs = {each: sum(map(self._split.cost, pieces)) for each, pieces in unbegun.items()}
        other = max(others, key=costs.__getitem__, default=None)
        if other is None or not unbegun[other]:
            return
        share = self.shares[other]
        if share.began is None:  # it is not free yet, nobody knows for how long: half of it, and in the end all
            wanted = unbegun[other][len(unbegun[other]) // 2 :]
            share.pieces.difference_update(wanted)
            self._give(worker, wanted)
            return
        wanted = self._split.half_of(unbegun[other], sum(self._costs[piece] for piece in share.pieces))
        if not wanted:
            self._empty.add(other)
            return
        self.shares[worker].asked = other
        other.tell(GiveUp(self.number, wanted))

    def _unbegun(self, worker: WorkerHandle) -> list[int]:
        share = self.shares[worker]
        return [piece for piece in sorted(share.pieces - share.ran) if self._is_open(piece)]

    def _hand_over(self, worker: WorkerHandle, pieces: Sequence[int]) -> None:
        self.shares[worker].pieces.difference_update(pieces)
        if not pieces:
            self._empty.add(worker)
        self._free += pieces
        for share in self.shares.values():
            if share.asked is worker:
                share.asked = None

    def _without(self, worker: WorkerHandle, why: str) -> None:
        share = self.shares[worker]
        share.end_part()
        already = bool(share.out)
        share.out, share.asked = why, None
        prompts = self._release(share)
        for each in self.shares.values():
            if each.asked is worker:
                each.asked = None
        self._empty.clear()
        if not already or prompts:
            self._tell_of(worker, why, prompts)

    def _tell_of(self, worker: WorkerHandle, why: str, prompts: int) -> None:
        others = sum(not share.out and not each.dead for each, share in self.shares.items())
        if others:
            whose = f"the other {others}" if others > 1 else "the other one"
            went_on = f"its {counted(prompts, 'prompt')} go to {whose}" if prompts else "it had no work"
            self._notices(f"lost {worker.number}", f"{worker.name} {why}: {went_on}")
