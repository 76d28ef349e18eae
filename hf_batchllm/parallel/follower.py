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
from ..engine.device_loop.decode_rows import Pick
from ..engine.device_loop.seats import Seats
from ..engine.devices import Devices
from ..engine.job import Job
from ..errors import RanksError
from ..interrupts import Interrupts, uninterrupted
from ..model.attention.kv_storage import KVStorage
from ..model.device_memory import DeviceMemory, is_out_of_memory
from ..model.model_in_use import ModelInUse
from ..model.runner import ModelRunner
from ..sampling.sampling_kernels import sampling_kernels
from .asked import asked_for
from .group import INTERRUPTED, Group, Over, in_words, unpacked
from .leader import DEVICES, Answer, Numbered


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
            self._things |= {DEVICES: self, number: call.use}
            self._first = number
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

    def _do(
        self, number: int, name: str, given: Sequence[Any], named: dict[str, Any], keep: int | None, answers: bool
    ) -> None:
        if self._failed is not None:
            return  # the leader will hear of it
        group, value = self.group, None
        try:
            runner = self._call.use.runner
            with torch.no_grad(), nullcontext() if runner is None else runner.surroundings():
                things = [self._things[each.number] if isinstance(each, Numbered) else each for each in given]
                value = getattr(self._things[number], name)(*things, **named)
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

    def model_in_use(self, *given: Any) -> ModelInUse:
        use = super().model_in_use(*given)
        use.sums = lambda: self.group.sums(use.device, use._notices)
        return use

    # -- things ------------------------------------------------------------------------------------------------------

    def make_memory(self) -> DeviceMemory:
        return self.memory(self._device)

    def make_storage(self, *given: int) -> KVStorage:
        return self.storage(*given)

    def make_computed_with(self) -> ComputedWith:
        use = self._call.use
        return self.computed_with(use.model, use.architecture)

    def make_seats(self, stop_tokens: Sequence[frozenset[int]], keep_tokens: bool) -> Seats:
        """They get what the leader has picked."""
        seats = self.seats(stop_tokens, self._device, keep_tokens)
        own = seats.store
        object.__setattr__(seats, "store", lambda where: own(where, self._picked(len(where))))
        return seats

    def make_graphs(self, runner: ModelRunner, seats: Seats, picks: bool, most_times: int) -> DecodeGraphs | None:
        """Their rows go on from what the leader has picked."""
        use = self._call.use
        pick: Pick | None = None
        if picks:
            pick = lambda logits, seats, made: self._picked(len(seats))  # noqa: E731
        advance = sampling_kernels(use.device, use.kernels_by_name).advance if picks else None
        resources = self._call.resources
        graphs = self.graphs(resources.config, runner, seats, pick, advance, most_times, resources.notices, None)
        if graphs is not None:
            graphs.any_says = self.group.any
            self.group.counts(graphs)
            own = graphs.close
            on_gpu = use.device.type == "cuda"
            graphs.close = lambda: own(torch.cuda.current_stream(use.device) if on_gpu else None)  # type: ignore
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
