"""A follower runs what the leader numbers: it has no scheduler, sampler, clock, seed or limits of memory."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from ..engine.call import Call
from ..engine.call_outputs import CallOutputs
from ..engine.computed_with import ComputedWith
from ..engine.device_loop.decode_graphs import DecodeGraphs
from ..engine.id_lists import IdLists
from ..engine.job import Job
from ..errors import RanksError
from ..interrupts import Interrupts, uninterrupted
from ..model.attention.kv_storage import KVStorage
from ..results.generations import BatchResult, Generation
from ..sampling.sampling_kernels import sampling_kernels
from .asked import asked_for
from .group import INTERRUPTED, Ending, Group, GroupsDevices, Turn, in_words, unpacked
from .things import Numbered, Own, Shared


class Ended(BaseException):
    """The leader has ended the call."""


class _Prompts:
    """The prompts of this call, which results come without."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._place_of = {index: place for place, index in enumerate(job.places)}
        self._id_lists = IdLists()

    def put_in(self, results: Any) -> None:
        for row in results if isinstance(results, BatchResult) else [results]:
            if isinstance(row, Generation):
                ids = self._id_lists.of(self._job.prompts[self._place_of[row.index]].ids) if row.error is None else []
                object.__setattr__(row, "prompt_token_ids", ids)
                object.__setattr__(row, "prompt", self._job.prompt_as_passed(row.index))


class _TellsTheLeader(Interrupts):
    """A second one leaves the others, whose devices may wait for this one."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def act(self) -> None:
        """The leader does."""

    def _note(self, number: int, frame: Any) -> None:
        if self._in_force and self._came is None:
            self._came = frame
            self._group.watch.tell_of_interrupt()
            return
        self._group.watch.end(self._group.rank, INTERRUPTED)
        self._users(number, frame)


class Follower(GroupsDevices):
    """Does what frames say."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._things: dict[int, Any] = {}
        self._use: Any = None  # the ModelInUse of the call that it came to last
        self._first = 0  # number of a thing of this call
        self._turn = Turn("")
        self._prompts: _Prompts | None = None  # of this call

    @property
    def devices(self) -> Follower:
        """What stands for the devices of a leader."""
        return self

    # -- a call ------------------------------------------------------------------------------------------------------

    @contextmanager
    def call(self, kind: str) -> Iterator[Turn]:
        """The leader ends it, in the block. The results are in what this gives."""
        self.group.check()
        with self.group.watch.during_a_call():
            turn = self._turn = Turn(f"{kind} {self.group.number}")
            try:
                yield turn
            except Ended:
                pass
            except BaseException as error:
                self._fail(error)
                if turn.left and isinstance(error, RanksError):
                    raise turn.failed or error from None  # that is why
                raise
            finally:
                self._turn, self._prompts = Turn(""), None  # results are the caller's
        if turn.error is not None:
            raise turn.error from None

    def follow(self, call: Call, job: Job | None = None) -> Iterator[Any]:
        """The results of a stream. It ends in ``Ended``. Without a ``job`` all is done that the leader is asked for."""
        asked = {"calls": self._turn.kind, **self.group.digests}
        if job is not None:
            asked |= asked_for(job, call.resources.config)
            self._prompts = _Prompts(job)
        self._use = call.use
        with uninterrupted():
            self.group.answer("here", asked)
        if job is not None:  # otherwise nobody is there who may be waiting
            self.group.wait_for()
        return self._results()

    def _results(self) -> Iterator[Any]:
        turn, interrupts = self._turn, _TellsTheLeader(self.group)
        interrupts.begin()
        try:
            while True:
                kind, *said = self.group.receive()
                answered = turn.failed is not None and not turn.left  # the leader has read that
                if turn.told and (answered or kind == "over"):
                    turn.told = False
                    self.group.watch.all_have_heard()
                if kind == "do":
                    self._do(*said)
                elif kind == "over":
                    self._end(*said)
                elif kind == "begin":
                    self._begin(*said)
                else:
                    self._use.put_back()
                    interrupts.pause()
                    with self.group.watch.elsewhere():
                        yield self._results_in(said[0])
                    interrupts.begin()
        finally:
            interrupts.end(turn.error)

    def _begin(self, number: int, there: Sequence[int]) -> None:
        self._things = {each: thing for each, thing in self._things.items() if each in there}
        self._things |= {0: self, number: self._use}
        self._first = number
        self._turn.begun = True
        self.group.begin()

    def _end(self, ending: Ending) -> None:
        """Nothing of the call stays on the device but what later ones may need."""
        turn, group = self._turn, self.group
        turn.is_over = True
        group.answer("over")
        if turn.begun:
            self._use.drop_runner()
            if ending.how != "done":
                self._use.release()
            self._drop(everything=turn.left)
        if ending.how == INTERRUPTED:
            turn.error = self._results_in(ending.results)
        elif turn.failed is not None and (ending.rank == group.rank or (turn.left and ending.how == "done")):
            turn.error = turn.failed
        elif ending.how == "failed":
            turn.error = self._results_in(ending.results) if ending.results else RanksError(ending.said)
        else:
            turn.results = self._results_in(ending.results)
        raise Ended

    def _results_in(self, frame: bytes) -> Any:
        found = unpacked(frame, self._use.device if self._turn.begun else torch.device("cpu"))
        if self._turn.begun and self._prompts is not None:
            self._prompts.put_in(found[0] if isinstance(found, tuple) else getattr(found, "result", found))
        return found

    def _fail(self, error: BaseException) -> None:
        """This rank leaves the call by itself. Steps on their way are those of all devices, and go on."""
        turn, group = self._turn, self.group
        if turn.is_over:
            return
        with suppress(Ended, RanksError):
            with uninterrupted():
                group.answer("failed", group.failure(error))
                if not isinstance(error, GeneratorExit):
                    group.watch.tell(in_words(error))
                    turn.told = True
            if group.watch.failure is None:
                for _ in self._results():
                    pass

    def _drop(self, everything: bool) -> None:
        for number, thing in [*self._things.items()]:
            if everything and isinstance(thing, DecodeGraphs):  # a group of devices cannot end before its graphs
                thing.close()
            if everything and isinstance(thing, KVStorage):
                thing.release()
            if everything or (number >= self._first and not isinstance(thing, KVStorage | ComputedWith)):
                del self._things[number]

    def forget(self) -> None:
        """Give back the memory of prefixes that were kept."""
        for number, thing in [*self._things.items()]:
            if isinstance(thing, KVStorage):
                thing.release()
                del self._things[number]

    # -- frames ------------------------------------------------------------------------------------------------------

    def _do(self, number: int, name: str, given: Sequence[Any], keep: int | None, answers: bool) -> None:
        turn, group = self._turn, self.group
        if turn.left:
            return
        try:
            runner = self._use.runner
            with torch.no_grad(), nullcontext() if runner is None else runner.surroundings():
                value = getattr(self._things[number], name)(*map(self._here, given))
        except Exception as error:
            turn.failed, turn.left, turn.told = error, not answers, True
            if answers:  # and all may go on: frames hold tensors
                traceback.clear_frames(error.__traceback__)
            group.watch.tell(in_words(error))
            group.answer("failed", group.failure(error))
            return
        if keep is not None and value is not None:
            self._things[keep], value = value, None
        if answers:
            group.answer("said", value)

    def _here(self, given: Any) -> Any:
        """What ``given`` stands for."""
        match given:
            case Numbered(number):
                return self._things[number]
            case Own(name):
                return getattr(self._use, name)
            case Shared(number):
                return self._picked(number)
        return given

    def _picked(self, count: int) -> torch.Tensor:
        return self.group.broadcast(torch.empty(count, dtype=torch.long, device=self._use.device))

    # -- devices -----------------------------------------------------------------------------------------------------

    def graphs(self, *given: Any) -> DecodeGraphs | None:
        config, runner, seats, picks, times = given
        pick = advance = None
        if picks:
            pick = lambda logits, seats, made: self._picked(len(seats))  # noqa: E731
            advance = sampling_kernels(self._use.device, self._use.kernels_by_name).advance
        return super().graphs(config, runner, seats, pick, advance, times, self._use.notices, None)

    def close(self) -> None:
        self._things.clear()
        super().close()


class FollowersCall(Call):
    def begin(self, job: Job, outputs: CallOutputs, strict: bool) -> None:
        """The leader runs it: this ends in ``Ended``."""
        follower = self.resources.devices
        assert isinstance(follower, Follower)
        try:
            for _ in follower.follow(self, job):
                pass
        finally:
            if job.feed is not None:  # somebody may read from the streamer
                job.feed.end()
