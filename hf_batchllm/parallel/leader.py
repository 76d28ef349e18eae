"""The leader runs the engine as on one device. What touches its device tells the followers to do the same.

A thing that touches the device has a number. When a method of it is called, a ``do`` frame goes out first, with the
arguments; things stand for themselves there. Where something may fail on one device alone, each follower answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from ..engine.call import Call
from ..engine.call_outputs import CallOutputs
from ..engine.device_loop.decode_graphs import DecodeGraphs
from ..engine.device_loop.seats import Seats
from ..engine.devices import Devices
from ..engine.job import Job
from ..engine.loop import Watch
from ..errors import RanksError
from ..interrupts import uninterrupted
from ..model.batch import ModelBatch
from ..model.model_in_use import ModelInUse
from ..model.runner import ModelRunner
from ..planning.requests_and_prefixes import Request
from .asked import asked_for, without_the_model
from .group import FAILED, INTERRUPTED, Group, in_words, packed

_SAME_CALLS = "each rank must make the same calls, with the same prompts and options in the same order"
_NUMBER = "_number_on_followers"
DEVICES = 0  # the number of what makes things
OfAll = Callable[[list[Any]], Any]  # makes one of what all of them say
_ENDS = "release", "drop_runner", "close"  # done in any case, also where a follower has failed


def _first(each: list[Any]) -> Any:
    return each[0]


# The methods of things that followers call as well. None: nobody asks what they say.
_LASTING: dict[str, dict[str, OfAll | None]] = {  # things of more than one call
    "memory": {
        "free": min,
        "taken_since_mark": max,
        **dict.fromkeys(("trim", "start", "mark")),
    },
    "storage": {**dict.fromkeys(("reserve", "grow", "keep_only"), _first), "release": None},
    "computed_with": {"holds_for": all},
}


class Numbered(NamedTuple):
    """Stands for a thing in a frame."""

    number: int


class Answer(NamedTuple):
    """A follower's."""

    value: Any
    why: str | None  # it has failed, in words
    no_memory: bool  # as that is why
    given: tuple[int, int]  # to its device


class Leader(Devices):
    """Makes things that lead."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._numbers = itertools.count(DEVICES + 1)
        self._things: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._come: dict[int, Any] = {}  # followers that have come to the call: what they ask for, or why they cannot
        self._shadowed: list[tuple[Any, str]] = []
        self._begun = self._within = self._is_over = False

    # -- a call ------------------------------------------------------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[Callable[[bytes], None]]:
        """An error in the block ends the call on all. What this gives ends it well: it takes the results."""
        group = self.group
        self._come, self._begun, self._is_over, group.watch.interrupted = {}, False, False, False
        group.check()
        try:
            with group.watch.during_a_call():
                yield self._finish
        except BaseException as error:
            with uninterrupted():
                gone = None if self._is_over else self._fail(error)
            if isinstance(error, RanksError):
                error._are_level = group.watch.failure is None
            elif isinstance(error, Exception):
                if gone is not None:
                    raise gone from error
                group.check()  # what came from the device may have meant nothing
            raise
        finally:
            self._begun = False
            for thing, name in self._shadowed:  # what holds itself would stay in memory
                vars(thing).pop(name, None)
            self._shadowed.clear()

    def meet(self, asked: dict[str, bytes], use: ModelInUse) -> None:
        """All have come to the call, and ask for the same."""
        group = self.group
        with uninterrupted():
            self._wait_for_all()
            for rank, (_, why) in self._come.items():
                if why is not None:
                    raise group.error_of(rank, why)
            for what, ours in asked.items():
                others = [rank for rank, (theirs, _) in self._come.items() if theirs[what] != ours]
                if others:
                    raise RanksError(
                        f"the {group.size} ranks that run this model together have different {what}: {_SAME_CALLS} "
                        f"(rank {others[0]} has others than rank 0)"
                    )
            self._number(use, next(self._numbers))
            group.tell("begin", getattr(use, _NUMBER), [*self._things])
            self._begun = True
            group.begin()

    def _wait_for_all(self) -> None:
        with self.group.says_that_it_waits():
            for rank in self.group.followers:
                if rank not in self._come:
                    self._come[rank] = self.group.receive(rank)[1:]

    def hand_out(self, result: bytes) -> None:
        """One of a stream."""
        with uninterrupted():
            self.group.tell("result", result)

    def _finish(self, results: bytes) -> None:
        with uninterrupted():
            self._hear()
            for rank, (_, failed) in self._end("done", "", results).items():
                if failed is not None:
                    raise self.group.error_of(rank, failed)

    def _fail(self, error: BaseException) -> RanksError | None:
        """Followers hear of it, where they wait for a frame; the watch ends the wait of those that wait elsewhere.

        An error if one of them is gone, which may be why.
        """
        group, ours = self.group, not isinstance(error, RanksError | KeyboardInterrupt)
        try:
            if ours:
                group.watch.tell(in_words(error))
            if not self._begun:
                self._wait_for_all()
            if isinstance(error, KeyboardInterrupt):
                ended = self._end(INTERRUPTED, "", packed(error.with_traceback(None)))
            else:
                said = str(error if isinstance(error, RanksError) else group.error_of(0, in_words(error)))
                ended = self._end("failed", said, b"")
            if self._begun:
                rank, why = getattr(error, FAILED, (0, in_words(error)))
                self._end_if_apart([given for given, _ in ended.values()], rank, why)
            if ours:
                group.watch.all_have_heard()
        except RanksError as gone:
            return gone
        return None

    def _end(self, how: str, said: str, results: bytes) -> dict[int, tuple[tuple[int, int], str | None]]:
        """What the device of each follower was given, and why it has failed if it has."""
        self._is_over = True
        self.group.tell("over", how, said, results)
        ended = {}
        for rank in self.group.followers:
            failed = None
            while (frame := self.group.receive(rank))[0] != "over":
                failed = frame[1] if frame[0] == "failed" else failed
            ended[rank] = frame[1], failed
        return ended

    def _end_if_apart(self, each: Sequence[tuple[int, int]], rank: int, why: str) -> None:
        """Devices that wait for what another was not given wait for ever: their group is of no use any more."""
        if any(given != self.group.given() for given in each):
            self.group.watch.end(rank, why)

    # -- what followers do as well -----------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Has a follower failed?"""
        for rank in self.group.followers:
            if self.group.waiting(rank):
                self.group.said_by(rank)

    def _listen(self) -> None:
        """Before anything else is done by all: has a follower failed, or was it interrupted?"""
        self._hear()
        if self.group.watch.interrupted:
            self.group.watch.interrupted = False
            raise KeyboardInterrupt
        self.group.check()

    def _number(self, thing: Any, number: int) -> None:
        object.__setattr__(thing, _NUMBER, number)
        self._things[number] = thing

    def _lead(
        self,
        thing: Any,
        methods: Mapping[str, OfAll | None],
        sends: Callable[..., Sequence[Any]] = lambda *given: given,
        keeps: bool = False,
    ) -> Any:
        """From here on all call these methods. Followers get what ``sends`` makes of the arguments.

        keeps: what comes of them is a thing as well.
        """
        for name, of_all in methods.items():
            object.__setattr__(
                thing, name, partial(self._call, thing, name, getattr(thing, name), of_all, sends, keeps)
            )
            if methods not in _LASTING.values():
                self._shadowed.append((thing, name))
        return thing

    def _call(
        self, thing: Any, name: str, own: Callable[..., Any], of_all: OfAll | None, sends: Any, keeps: bool,
        *given: Any, **named: Any,
    ) -> Any:  # fmt: skip
        if not self._begun and name in _ENDS:  # followers drop theirs when the next call begins
            self._things.pop(getattr(thing, _NUMBER), None)
        if not self._begun or self._within:
            return own(*given, **named)
        make = partial(own, *given, **named)
        return self._together(getattr(thing, _NUMBER), name, make, of_all, keeps, sends(*given), named)

    def _together(
        self, number: int, name: str, own: Callable[[], Any], of_all: OfAll | None, keeps: bool,
        given: Sequence[Any], named: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        sent = [Numbered(getattr(each, _NUMBER)) if hasattr(each, _NUMBER) else each for each in given]
        keep, ends = next(self._numbers) if keeps else None, name in _ENDS
        with uninterrupted():
            with suppress(RanksError) if ends else nullcontext():
                if not ends:
                    self._listen()
                self.group.tell("do", number, name, sent, named, keep, of_all is not None)
            value, error, self._within = None, None, True
            try:
                value = own()
            except Exception as failed:
                if of_all is None:
                    raise
                error = failed
            finally:
                self._within = False
            if keep is not None and value is not None:
                self._number(value, keep)
            return value if of_all is None else of_all(self._all_said(value, error))

    def _all_said(self, value: Any, error: Exception | None) -> list[Any]:
        """With the leader's own. An error where it has failed on one of them."""
        group = self.group
        if error is not None:
            group.watch.tell(in_words(error))  # the others may wait for their devices
        answers: list[Answer] = [group.said_by(rank) for rank in group.followers]
        failed = next(((rank, each) for rank, each in enumerate(answers, 1) if each.why is not None), None)
        if error is None and failed is None:
            return [value, *(each.value for each in answers)]
        given = [each.given for each in answers]
        if error is not None or failed is None:
            assert error is not None
            self._end_if_apart(given, 0, in_words(error))
            group.check()
            group.watch.all_have_heard()
            raise error
        rank, (_, why, no_memory, _) = failed
        self._end_if_apart(given, rank, str(why))
        group.check()
        if no_memory:
            raise torch.OutOfMemoryError("another process that runs this model has no memory for its part")
        raise group.error_of(rank, str(why))

    # -- things ------------------------------------------------------------------------------------------------------

    def _made(self, kind: str, make: Callable[[], Any], *given: Any) -> Any:
        """Made by all of them, where a call has begun."""
        if self._begun:
            made = self._together(DEVICES, f"make_{kind}", make, _first, True, given, {})
        else:
            self._number(made := make(), next(self._numbers))
        return made

    def memory(self, *given: Any) -> Any:
        return self._lead(self._made("memory", partial(super().memory, *given)), _LASTING["memory"])

    def storage(self, *given: Any) -> Any:
        return self._lead(self._made("storage", partial(super().storage, *given), *given), _LASTING["storage"])

    def computed_with(self, *given: Any) -> Any:
        return self._lead(
            self._made("computed_with", partial(super().computed_with, *given)), _LASTING["computed_with"]
        )

    def seats(self, stop_tokens: Sequence[frozenset[int]], device: torch.device, keep_tokens: bool = True) -> Seats:
        make = partial(super().seats, stop_tokens, device, keep_tokens)
        seats: Seats = self._made("seats", make, stop_tokens, keep_tokens)
        own = seats.store
        object.__setattr__(seats, "store", lambda where, picked: own(where, self.group.broadcast(picked)))
        self._lead(seats, {"store": None}, lambda where, _: [where])
        self._lead(seats, {"set": None})
        return seats

    def graphs(self, config: Any, runner: Any, seats: Any, pick: Any, advance: Any, most_times: int, *more: Any) -> Any:
        picks = None if pick is None else lambda *given: self.group.broadcast(pick(*given))
        make = partial(super().graphs, config, runner, seats, picks, advance, most_times, *more)
        graphs: DecodeGraphs | None = self._made("graphs", make, runner, seats, pick is not None, most_times)
        if graphs is None:
            return None
        graphs.any_says = self.group.any
        self.group.counts(graphs)
        self._lead(graphs, {"run": None}, lambda batch, steps: [sendable(batch), steps])
        self._lead(graphs, {"close": None}, lambda _: [])
        return self._lead(graphs, dict.fromkeys(("prepare", "ready_for_drafts", "owner_had_control")))

    def model_in_use(self, *given: Any) -> Any:
        use = super().model_in_use(*given)
        use.sums = partial(self.group.sums, use.device, given[-1])
        self._lead(use, {"check": self._same_kernels, "fuse": _first, "drop_runner": None})
        self._lead(use, {"run_over": None}, lambda storage, *_: [storage], keeps=True)
        run_over = use.run_over
        object.__setattr__(use, "run_over", lambda *given: self._leading(run_over(*given)))
        return use

    def _leading(self, runner: ModelRunner) -> ModelRunner:
        self._lead(runner, {"launch": None}, lambda batch, latest: [sendable(batch), latest])
        self._lead(runner, {"try_step": _first}, lambda batch: [sendable(batch)])
        users_turn = runner.control.users_turn

        @contextmanager
        def alone() -> Iterator[None]:
            with users_turn(), without_the_model(runner.model, self.group.size):
                yield

        runner.control.users_turn = alone  # type: ignore[method-assign]
        self._shadowed.append((runner.control, "users_turn"))
        return runner

    def _same_kernels(self, each: list[list[str]]) -> list[str]:
        if any(others != each[0] for others in each):
            raise RanksError(
                f"the {self.group.size} ranks that run this model together have different kernels that can be used: "
                'leave more memory free, or pass `backend="torch"` on all of them'
            )
        return each[0]

    def close(self) -> None:
        self.group.close()


class LeadersCall(Call):
    @property
    def _leader(self) -> Leader:
        leader = self.resources.devices
        assert isinstance(leader, Leader)
        return leader

    def begin(self, job: Job, outputs: CallOutputs, strict: bool) -> None:
        self._leader.meet(asked_for(job, self.resources.config), self.use)
        super().begin(job, outputs, strict)

    def run(self, watch: Watch | None = None) -> Iterator[Request]:
        self.engine.after_waiting = self._leader.group.check
        return super().run(watch)

    @contextmanager
    def owner_in_control(self) -> Iterator[None]:
        with super().owner_in_control(), self._leader.group.watch.elsewhere():
            yield


def sendable(batch: ModelBatch) -> ModelBatch:
    """Without requests, which followers know nothing of."""
    return replace(batch, asked=[])
