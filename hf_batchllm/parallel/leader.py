"""The leader runs the engine as on one device. What touches its device tells the followers to do the same.

A thing that touches the device has a number. Where a method of it is called that things.py names, a ``do`` frame goes
out first, with the arguments. Where something may fail on one device alone, each follower answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..engine.call import Call
from ..engine.call_outputs import CallOutputs
from ..engine.device_loop.decode_graphs import DecodeGraphs
from ..engine.job import Job
from ..errors import BatchLLMError, RanksError
from ..interrupts import uninterrupted
from ..model.model_in_use import ModelInUse
from .asked import asked_for, refusing_the_model
from .group import INTERRUPTED, Ending, Failure, Group, GroupsDevices, Turn, in_words, packed
from .things import Shared, Way, lead, sent


class Leader:
    """Tells followers. ``hands_on``: whether they get results."""

    def __init__(self, group: Group, hands_on: bool) -> None:
        self.group = group
        self._hands_on = hands_on
        self._numbers = itertools.count()
        self._things: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._turn = Turn("")
        self._come: dict[int, Any] = {}  # what followers have said that have come to it
        self._within = False  # what all do
        self.devices = LeadersDevices(group)
        self.lead(self.devices, "devices")

    # -- a call ------------------------------------------------------------------------------------------------------

    @contextmanager
    def call(self, kind: str) -> Iterator[Turn]:
        """An error in the block ends the call on all. Results that it leaves in what this gives end it well."""
        group = self.group
        group.check()
        with group.watch.during_a_call():
            turn, self._come = Turn(f"{kind} {group.number}"), {}
            self._turn, group.watch.interrupted = turn, False
            try:
                yield turn
                if turn.results is not None:
                    self._finish(turn.results)
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._turn = Turn("")  # results are the caller's

    def meet(self, asked: dict[str, Any], use: ModelInUse) -> None:
        """All have come to the call, and ask for the same."""
        self._wait_for_all()
        with uninterrupted():
            asked = {"calls": self._turn.kind, **self.group.digests, **asked}
            for rank, (kind, said, _) in self._come.items():
                if kind == "failed":
                    raise self.group.error_of(said)
                for what, theirs in said.items():
                    if theirs != asked[what]:
                        raise self.group.different(what, rank)
            self.lead(use, "use")
            self.group.tell("begin", sent(use).number, [*self._things])
            self._turn.begun = True
            self.group.begin()

    def _wait_for_all(self) -> None:
        for rank in self.group.followers:
            if rank not in self._come:
                self.group.wait_for(rank)
                with uninterrupted():
                    self._come[rank] = self.group.receive(rank)

    def hand_out(self, result: Any) -> None:
        """One of a stream."""
        with uninterrupted():
            self.group.tell("result", packed(result))

    def _finish(self, results: Any) -> None:
        with uninterrupted():
            self.group.listen()
            data = packed(results if self._hands_on else None)  # which may fail
            self._turn.is_over = True
            ended = self.group.end(Ending("done", results=data))
            failure = next((failure for _, failure in ended if failure is not None), None)
            if failure is not None:
                self._end_if_apart([given for given, _ in ended], failure)
                raise self.group.error_of(failure)

    def _fail(self, error: BaseException) -> None:
        """Followers hear of it, where they wait for a frame; the watch ends the wait of those that wait elsewhere."""
        if not self._turn.is_over:
            with suppress(RanksError):  # the group has ended
                self._end_with(error)
        if isinstance(error, Exception) and not isinstance(error, RanksError):
            self.group.check()  # what came from the device may have meant nothing, of which comes this error

    def _end_with(self, error: BaseException) -> None:
        group, ours = self.group, not isinstance(error, RanksError | KeyboardInterrupt)
        if ours:
            group.watch.tell(in_words(error))
        if not self._turn.begun:
            try:
                self._wait_for_all()
            except KeyboardInterrupt:  # the second one, as a rule: some may never come
                group.watch.end(0, INTERRUPTED)
                raise
        with uninterrupted():
            failure, data = _behind(error) or Failure(0, in_words(error)), self._shown(error)
            self._turn.is_over = True
            if isinstance(error, KeyboardInterrupt):
                ended = group.end(Ending(INTERRUPTED, results=data or packed(KeyboardInterrupt())))
            else:
                said = str(error if isinstance(error, RanksError) else group.error_of(failure))
                ended = group.end(Ending("failed", failure.rank, said, data))
            if self._turn.begun:
                self._end_if_apart([given for given, _ in ended], failure)
            if ours:
                group.watch.all_have_heard()

    def _shown(self, error: BaseException) -> bytes:
        """The error as all ranks raise it, where the call had begun and it is the library's own; else nothing."""
        if isinstance(error, RanksError) or not (self._hands_on and self._turn.begun):
            return b""
        with suppress(Exception):  # what cannot be packed is told in words
            return packed(error) if isinstance(error, BatchLLMError | KeyboardInterrupt) else b""
        return b""

    def _end_if_apart(self, each: Sequence[tuple[int, int]], failure: Failure) -> None:
        """Devices that wait for what another was not given wait for ever: their group is of no use any more."""
        if any(given != self.group.given() for given in each):
            self.group.watch.end(failure.rank, failure.why)

    # -- what followers do as well -----------------------------------------------------------------------------------

    def lead(self, thing: Any, kind: str, number: int | None = None) -> None:
        number = next(self._numbers) if number is None else number
        lead(thing, kind, self, number)
        self._things[number] = thing

    def do(self, thing: Any, name: str, way: Way, own: Callable[..., Any], given: Sequence[Any]) -> Any:
        """On all of them, as ``Way`` has it, where a call has begun. own: does it here."""
        if not self._turn.begun or self._within:
            if way.ends and not self._turn.begun:  # followers drop theirs when the next call begins
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

    def _listen(self) -> None:
        """Before anything else is done by all: has a follower failed, or was it interrupted?"""
        self.group.listen()
        if self.group.watch.interrupted:
            self.group.watch.interrupted = False
            raise KeyboardInterrupt
        self.group.check()

    def _all_said(self, value: Any, error: Exception | None) -> list[Any]:
        """With the leader's own. An error where it has failed on one of them."""
        group = self.group
        if error is not None:
            group.watch.tell(in_words(error))  # the others may wait for their devices
        answers = [group.receive(rank) for rank in group.followers]
        failures = [said for kind, said, _ in answers if kind == "failed"]
        if error is not None:
            failures.insert(0, group.failure(error))
        if not failures:
            return [value, *(said for _, said, _ in answers)]
        first = failures[0]
        self._end_if_apart([given for _, _, given in answers], first)
        group.check()
        if error is not None:
            group.watch.all_have_heard()
            raise error
        if first.no_memory:
            lack = torch.OutOfMemoryError("another process that runs this model has no memory for its part")
            raise lack from group.error_of(first)
        raise group.error_of(first)


def _behind(error: BaseException | None) -> Failure | None:
    """Another rank's."""
    while error is not None:
        if isinstance(error, RanksError) and error._failure is not None:
            found: Failure = error._failure
            return found
        error = error.__cause__
    return None


class LeadersDevices(GroupsDevices):
    """Tokens that are picked on the leader's device go to all devices."""

    _leader: Leader

    def graphs(self, config: Any, runner: Any, seats: Any, pick: Any, *others: Any) -> DecodeGraphs | None:
        shared = None if pick is None else lambda *given: self.group.broadcast(pick(*given))
        return super().graphs(config, runner, seats, shared, *others)


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
    def user_in_control(self) -> Iterator[None]:
        with super().user_in_control(), self._leader.group.watch.elsewhere():
            yield
