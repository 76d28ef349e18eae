"""One call of a pool: who runs which pieces, what comes of them, and what happens when a worker is lost.

Each worker has a share from the start, and is given it as soon as it is free. It begins the pieces as its memory
allows. A worker that has run out of work takes over pieces that another has not begun. What a lost worker has not
delivered is run by the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..engine.progress import CallBar
from ..wording import counted
from .crew import Crew
from .messages import Begun, Blame, Died, Done, Failed, GiveUp, Parcel, Progress, Run, Stop
from .share import Share
from .work import Work, key_of
from .worker_handle import WorkerHandle

_LAST_REPORTS = 10.0  # seconds for a worker's report, once all results are there
_MOST_DEVICES = 2  # that a piece may cost


class PoolCall:
    def __init__(self, crew: Crew, work: Work, strict: bool) -> None:
        """``strict``: units that do not fit are an error of the call, not of theirs alone."""
        workers = crew.alive
        assert crew.loaded is not None
        self._split = work.split(len(workers), crew.loaded.costs)
        self.number = next(crew.numbers)
        self.began = time.time()
        self._clock = time.perf_counter()
        self._ended_at: float | None = None
        self._drawn_at = 0.0
        self._crew = crew
        self._work = work
        self._strict = strict
        self._units = [piece.prompts for piece in self._split.pieces]
        self._piece_of = {unit: piece for piece, units in enumerate(self._units) for unit in units}
        self._missing = {unit: set(keys) for unit, keys in enumerate(work.keys)}
        self._left = [len(units) for units in self._units]  # of each piece, units that have not all of their results
        self._whole = self._cost(range(len(self._units)))
        self._devices_lost = [0] * len(self._units)  # over each piece
        self._free: list[int] = []  # pieces that no worker has
        self._last_error: BaseException | None = None
        split = zip(workers, self._split.shares, strict=True)
        self.shares = {worker: Share(worker.device.name, set(pieces)) for worker, pieces in split}

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

    def draw(self, bar: CallBar, finished: int) -> None:
        """How much of the whole cost is behind it, as far as results have come. Now and then, as the bar has it."""
        if bar.disable or (time.perf_counter() - self._drawn_at < bar.mininterval and self._missing):
            return
        self._drawn_at = time.perf_counter()
        whole, shares = self._work.plan.computed_tokens, self.shares.values()
        read, written = min(sum(each.read for each in shares), whole), sum(each.written for each in shares)
        passed, done = self.seconds, 1.0
        if self._whole:
            done = 1 - self._cost(range(len(self._units))) / self._whole
        said = f"read {read:,} / {whole:,} · written {written:,} · {(read + written) / max(passed, 1e-9):,.0f} tok/s"
        bar.draw(finished, done, passed, passed * (1 - done) / done if done else None, said)

    def _cost(self, pieces: Iterable[int]) -> float:
        """The cost of what is left of these pieces."""
        return sum(self._split.cost(piece) * self._left[piece] / len(self._units[piece]) for piece in pieces)

    # -- what comes in -------------------------------------------------------------------------------------------

    def _take(self, worker: WorkerHandle, message: Any) -> Iterator[Any]:
        if worker not in self.shares:
            pass  # it was lost before this call
        elif isinstance(message, Died):
            self._without(worker)
        elif getattr(message, "call", None) != self.number:
            pass  # of an earlier call, or of none
        elif isinstance(message, Progress):
            share = self.shares[worker]
            share.read, share.written = message.read, message.written
            if message.problems:
                self._set_aside(message.problems)
            yield from self._collect(share, message.results)
        elif isinstance(message, Begun):
            self.shares[worker].begun.add(message.piece)
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
            self._left[self._piece_of[unit]] -= 1

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
                self._devices_lost[piece] += self._left[piece] > 0
            if max(self._devices_lost, default=0) >= _MOST_DEVICES:
                raise error
            return  # the worker ends
        share.end_part()
        share.out = f"ran out of memory ({message.text[:300]})"
        self._tell_of(worker, share.out, self._release(share))

    def _release(self, share: Share) -> int:
        """What is left of a worker's pieces is anybody's. Gives the number of prompts."""
        left = [piece for piece in sorted(share.pieces) if self._left[piece]]
        share.pieces.clear()
        self._free += left
        return sum(self._left[piece] for piece in left)

    # -- who runs what -------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Work for those who have none."""
        here = [worker for worker, share in self.shares.items() if not share.out and not worker.dead]
        if not here:
            raise self._last_error if self._crew.alive and self._last_error is not None else self._crew.none_left()
        idle = []
        for worker in here:
            share = self.shares[worker]
            if not worker.free or share.began is not None:
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
                self._take_over(worker)

    def _give(self, worker: WorkerHandle, pieces: Iterable[int]) -> None:
        """These are all that it has. Nothing is to run where all of their results have come."""
        share = self.shares[worker]
        share.pieces = {piece for piece in pieces if self._left[piece]}
        share.begun.clear()
        units = sorted(unit for piece in share.pieces for unit in self._units[piece] if unit in self._missing)
        if not units:
            return
        part = self._work.part(units)
        piece_of = dict(zip(part.numbers, map(self._piece_of.__getitem__, units), strict=True))
        message = Run(self.number, Parcel.of(part, "an option of this call"), piece_of, self.began)
        share.began = time.perf_counter()
        worker.begin(message)

    def _take_over(self, worker: WorkerHandle) -> None:
        """Pieces that another has not begun, as far as is known here: what begins in this moment is run by both."""
        others = [each for each in self.shares if each is not worker and not each.dead]
        unbegun = {each: self._unbegun(self.shares[each]) for each in others}
        for other in sorted(unbegun, key=lambda each: sum(map(self._split.cost, unbegun[each])), reverse=True):
            share, pieces = self.shares[other], unbegun[other]
            if share.began is None:  # it is not free yet, nobody knows for how long: half of it, and in the end all
                wanted = pieces[len(pieces) // 2 :]
            else:
                wanted = self._split.half_of(pieces, self._cost(share.pieces))
            if wanted:
                share.pieces.difference_update(wanted)
                other.tell(GiveUp(wanted))
                self._give(worker, wanted)
                return

    def _unbegun(self, share: Share) -> list[int]:
        return [piece for piece in sorted(share.pieces - share.begun) if self._left[piece]]

    def _without(self, worker: WorkerHandle) -> None:
        share = self.shares[worker]
        share.end_part()
        already, share.out = bool(share.out), worker.how_it_ended
        prompts = self._release(share)
        if not already or prompts:
            self._tell_of(worker, share.out, prompts)

    def _tell_of(self, worker: WorkerHandle, why: str, prompts: int) -> None:
        others = sum(not share.out and not each.dead for each, share in self.shares.items())
        if others:
            whose = f"the other {others}" if others > 1 else "the other one"
            went_on = f"its {counted(prompts, 'prompt')} go to {whose}" if prompts else "it had no work"
            self._crew.notices(f"lost {worker.number}", f"{worker.name} {why}: {went_on}")
