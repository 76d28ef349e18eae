"""A follower runs what the leader numbers: it has no scheduler, sampler, clock, seed or limits of memory."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch

from ..engine.call import Call
from ..engine.call_outputs import CallOutputs
from ..engine.computed_with import ComputedWith
from ..engine.device_loop.decode_graphs import DecodeGraphs
from ..engine.devices import Devices
from ..engine.job import Job
from ..errors import RanksError
from ..interrupts import Interrupts, uninterrupted
from ..model.attention.kv_storage import KVStorage
from ..model.device_memory import is_out_of_memory
from ..model.model_in_use import ModelInUse
from ..sampling.sampling_kernels import sampling_kernels
from .asked import asked_for
from .group import INTERRUPTED, Group, Over, in_words, unpacked
from .leader import Answer
from .things import Numbered, Own, Shared


class Followed(BaseException):
    """The leader has ended the call: with results, or with an error."""

    def __init__(self, results: Any, error: BaseException | None = None) -> None:
        self.results, self.error = results, error
        super().__init__()


class _TellsTheLeader(Interrupts):
    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def _note(self, number: int, frame: Any) -> None:
        self._group.watch.tell_of_interrupt()


class Follower(Devices):
    """Does what frames say. ``call``: the one that runs."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._things: dict[int, Any] = {}
        self._call: Call
        self._first = 0  # number of a thing of this call
        self._has_come = self._is_over = False
        self._failed: BaseException | None = None  # in a frame
        self._answered: BaseException | None = None  # a failure that may have been one of memory, and no error
        self._told = False  # the watch, of a failure that the leader has not answered yet

    # -- a call ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """It will come to a call."""
        self.group.check()
        self._has_come = self._is_over = self._told = False
        self._failed = self._answered = None

    def meet(self, call: Call, job: Job) -> None:
        """All have come to the call."""
        asked = asked_for(job, call.resources.config)
        self._call = call
        with uninterrupted():
            self._has_come = True
            self.group.send(0, "here", asked, None)
            with self.group.says_that_it_waits():
                frame = self.group.receive()
            if frame[0] == "over":
                raise self._ended(frame)
            _, number, there = frame
            self._things = {each: thing for each, thing in self._things.items() if each in there}
            self._things |= {0: self, number: call.use}
            self._first = number
            use, resources = call.use, call.resources
            self._own = {
                "model": use.model,
                "architecture": use.architecture,
                "device": use.device,
                "config": resources.config,
                "notices": resources.notices,
                "pick": lambda logits, seats, made: self._picked(len(seats)),
                "advance": sampling_kernels(use.device, use.kernels_by_name).advance,
            }
            self.group.begin()

    def results(self) -> Iterator[Any]:
        """Those of a stream. It ends in ``Followed``."""
        interrupts = _TellsTheLeader(self.group)
        interrupts.begin()
        try:
            while True:
                try:
                    frame = self.group.receive()
                    if self._told and self._failed is None:  # the leader has read the answer that said so
                        self._told = False
                        self.group.watch.all_have_heard()
                    if frame[0] == "do":
                        self._do(*frame[1:])
                        continue
                except Over as over:
                    frame = over.frame
                if frame[0] == "over":
                    raise self._ended(frame)
                self._call.use.put_back()
                interrupts.pause()
                with self.group.watch.elsewhere():
                    yield unpacked(frame[1], self._call.use.device)
                interrupts.begin()
        finally:
            interrupts.pause()

    def fail(self, error: BaseException) -> None:
        """This rank leaves the call by itself. Steps on their way are those of all devices, and go on."""
        if self._is_over:
            return
        with uninterrupted(), suppress(Followed, RanksError):
            if self._has_come:
                self.group.send(0, "failed", in_words(error))
            else:
                self.group.send(0, "here", {}, in_words(error))
            if not (self._has_come and isinstance(error, KeyboardInterrupt | GeneratorExit)):  # else no frame is lost
                self.group.watch.tell(in_words(error))
                self._told = True
            for _ in self.results():
                pass

    def _ended(self, frame: tuple[Any, ...]) -> Followed:
        """The leader has ended the call: nothing of it stays on the device but what later ones may need."""
        _, how, said, data = frame
        self._is_over = True
        if self._has_come and self._things:
            self._call.use.restore()
            if how != "done":
                self._call.use.release()
            self._drop(everything=self._failed is not None)
        self.group.send(0, "over", self.group.given())
        if self._told:
            self._told = False
            self.group.watch.all_have_heard()
        if self._failed is not None and how != INTERRUPTED:
            return Followed(None, self._failed)
        if self._answered is not None and said == str(self.group.error_of(self.group.rank, in_words(self._answered))):
            return Followed(None, self._answered)
        if how == "failed":
            return Followed(None, RanksError(said))
        results = unpacked(data, self._device)
        return Followed(None, results) if how == INTERRUPTED else Followed(results)

    @property
    def _device(self) -> torch.device:
        return self._call.use.device if self._has_come else torch.device("cpu")

    def _drop(self, everything: bool) -> None:
        for number, thing in [*self._things.items()]:
            if isinstance(thing, KVStorage) and everything:
                thing.release()
            if everything or (number >= self._first and not isinstance(thing, KVStorage | ComputedWith)):
                del self._things[number]

    # -- frames ------------------------------------------------------------------------------------------------------

    def _do(self, number: int, name: str, given: Sequence[Any], keep: int | None, answers: bool) -> None:
        if self._failed is not None:
            return  # the leader will hear of it
        group, value = self.group, None
        try:
            runner = self._call.use.runner
            with torch.no_grad(), nullcontext() if runner is None else runner.surroundings():
                value = getattr(self._things[number], name)(*map(self._here, given))
        except Exception as error:
            group.watch.tell(in_words(error))
            self._told = True
            if answers:
                traceback.clear_frames(error.__traceback__)  # they hold tensors
                self._answered = error
                group.send(0, "said", Answer(None, in_words(error), is_out_of_memory(error), self.group.given()))
            else:
                self._failed = error
                group.send(0, "failed", in_words(error))
            return
        if keep is not None and value is not None:
            self._things[keep], value = value, None
        if answers:
            group.send(0, "said", Answer(value, None, False, self.group.given()))

    def _here(self, given: Any) -> Any:
        """What ``given`` stands for."""
        match given:
            case Numbered(number):
                return self._things[number]
            case Own(name):
                return self._own[name]
            case Shared(number):
                return self._picked(number)
        return given

    # -- devices -----------------------------------------------------------------------------------------------------

    def model_in_use(self, *given: Any) -> ModelInUse:
        use = super().model_in_use(*given)
        use.sums = lambda: self.group.sums(use.device, use._notices)
        return use

    def graphs(self, *given: Any) -> DecodeGraphs | None:
        graphs = super().graphs(*given)
        if graphs is not None:
            graphs.any_says = self.group.any
            self.group.graphs = graphs
        return graphs

    def _picked(self, count: int) -> torch.Tensor:
        return self.group.broadcast(torch.empty(count, dtype=torch.long, device=self._device))

    def close(self) -> None:
        self._things.clear()
        self.group.close()


class FollowersCall(Call):
    def begin(self, job: Job, outputs: CallOutputs, strict: bool) -> None:
        """The leader runs it: this ends in ``Followed``."""
        follower = self.resources.devices
        assert isinstance(follower, Follower)
        follower.meet(self, job)
        for _ in follower.results():
            pass
