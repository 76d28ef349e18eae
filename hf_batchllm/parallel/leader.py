"""The leader runs the engine as on one device. What touches its device tells the followers to do the same.

A thing that touches the device has a number. Where a method of it is called that things.py names, a ``do`` frame goes
out first, with the arguments. Where something may fail on one device alone, each follower answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from ..engine.call import Call
from ..engine.call_outputs import CallOutputs
from ..engine.device_loop.decode_graphs import DecodeGraphs
from ..engine.devices import Devices
from ..engine.job import Job
from ..errors import RanksError
from ..interrupts import uninterrupted
from ..model.model_in_use import ModelInUse
from .asked import asked_for, refusing_the_model
from .group import FAILED, INTERRUPTED, Group, in_words, packed
from .things import Shared, Way, lead, plain, sent

_SAME_CALLS = "each rank must make the same calls, with the same prompts and options in the same order"


class Answer(NamedTuple):
    """A follower's."""

    value: Any
    why: str | None  # it has failed, in words
    no_memory: bool  # as that is why
    given: tuple[int, int]  # to its device


class Leader:
    """Tells followers."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._numbers = itertools.count()
        self._things: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._come: dict[int, Any] = {}  # followers that have come to the call: what they ask for, or why they cannot
        self._begun = self._within = self._is_over = False
        self.devices = LeadersDevices()
        self.lead(self.devices, "devices")

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
            self.lead(use, "use")
            group.tell("begin", use._number, [*self._things])  # type: ignore[attr-defined]
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

    def lead(self, thing: Any, kind: str, number: int | None = None) -> None:
        number = next(self._numbers) if number is None else number
        lead(thing, kind, self, number)
        self._things[number] = thing

    def do(self, thing: Any, name: str, way: Way, given: Sequence[Any]) -> Any:
        """On all of them, as ``Way`` has it, where a call has begun."""
        own = plain(thing, name)
        if not self._begun or self._within:
            if way.ends and not self._begun:  # followers drop theirs when the next call begins
                self._things.pop(thing._number, None)
            return own(*given)
        told, keep = way.sends(*given), next(self._numbers) if way.makes else None
        with uninterrupted():
            with suppress(RanksError) if way.ends else nullcontext():
                if not way.ends:
                    self._listen()
                self.group.tell("do", thing._number, name, [*map(sent, told)], keep, way.of_all is not None)
            value, error, self._within = None, None, True
            try:
                if told and isinstance(told[-1], Shared):
                    given = (*given[:-1], self.group.broadcast(given[-1]))
                value = own(*given)
            except Exception as failed:
                if way.of_all is None:
                    raise
                error = failed
            finally:
                self._within = False
            if keep is not None and value is not None:
                self.lead(value, way.makes, keep)
            return value if way.of_all is None else way.of_all(self._all_said(value, error))

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


class LeadersDevices(Devices):
    """Tokens that are picked on the leader's device go to all devices."""

    _leader: Leader

    def model_in_use(self, *given: Any) -> ModelInUse:
        use = super().model_in_use(*given)
        use.sums = partial(self._leader.group.sums, use.device, given[-1])
        return use

    def graphs(self, config: Any, runner: Any, seats: Any, pick: Any, *others: Any) -> DecodeGraphs | None:
        group = self._leader.group
        graphs = super().graphs(
            config, runner, seats, None if pick is None else lambda *given: group.broadcast(pick(*given)), *others
        )
        if graphs is not None:
            graphs.any_says = group.any
            group.graphs = graphs
        return graphs

    def close(self) -> None:
        self._leader.group.close()


class LeadersCall(Call):
    @property
    def _leader(self) -> Leader:
        devices = self.resources.devices
        assert isinstance(devices, LeadersDevices)
        return devices._leader

    def begin(self, job: Job, outputs: CallOutputs, strict: bool) -> None:
        self._leader.meet(asked_for(job, self.resources.config), self.use)
        super().begin(job, outputs, strict)

    def _wire(self) -> None:
        super()._wire()
        group = self._leader.group
        self.engine.after_waiting = group.check
        assert self.use.runner is not None
        self.use.runner.control.around_users = refusing_the_model(self.use.model, group.size)

    @contextmanager
    def owner_in_control(self) -> Iterator[None]:
        with super().owner_in_control(), self._leader.group.watch.elsewhere():
            yield
