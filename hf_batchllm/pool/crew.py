"""The workers of a pool, as the pool sees them: all of them, what comes from them, and what one of them is asked."""

from __future__ import annotations

import itertools
import os
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ConfigError, PoolError
from ..notices import Notices
from ..python_child import CannotStart
from ..wording import differing
from .devices import WorkerDevice
from .messages import Answered, Ask, Blame, Died, Failed, Load, Parcel, Ready, Warned
from .worker_handle import WorkerHandle

_EVENTS_EVERY = 0.5  # seconds, after which processes are looked after if nothing comes
_LOOK_EVERY = 1.0  # seconds
_SECONDS_TO_END = 10.0


class Crew:
    def __init__(
        self,
        devices: Sequence[WorkerDevice],
        load: Callable[[], Any],  # gives the generator, in each of them
        patience: float,  # seconds in which a step has to end
        notices: Notices,
    ) -> None:
        if os.name != "posix":
            raise ConfigError("a pool of processes needs Linux or macOS")
        self.patience = patience
        self.notices = notices
        self.events: queue.SimpleQueue[tuple[WorkerHandle, Any]] = queue.SimpleQueue()
        self.numbers = itertools.count(1)  # of calls, and of questions
        self.loaded: Ready | None = None  # what the first one has loaded
        self._owner = os.getpid()
        self._looked = time.monotonic()
        first = Load(Parcel.of(load, "what loads the model"))
        said: dict[str, int] = {}  # lines, and which worker printed each first: the others' are the same
        self.workers: list[WorkerHandle] = []
        try:
            for number, device in enumerate(devices):
                self.workers.append(WorkerHandle(number, device, devices, self.events, said))
            for worker in self.workers:
                worker.begin(first)
        except BaseException as error:
            self.end()
            if isinstance(error, CannotStart | OSError):
                raise ConfigError(f"no process could be started: {error}") from error
            raise

    @property
    def alive(self) -> list[WorkerHandle]:
        return [worker for worker in self.workers if not worker.dead]

    def check(self) -> None:
        """Raises what keeps this pool from being used."""
        if os.getpid() != self._owner:
            raise PoolError("this GeneratorPool belongs to the process that made it: make one in this process")
        if not self.alive:
            raise self.none_left()
        for worker in self.alive:
            if worker.loaded is None:
                continue
            if self.loaded is None:
                self.loaded = worker.loaded
            elif other := differing(self.loaded.fingerprint, worker.loaded.fingerprint):
                raise PoolError(
                    f"{worker.name} has loaded {other} than another, so answers would depend on where a prompt runs. A "
                    "function that loads the model must give the same each time: load it from a folder, or set a seed "
                    "before weights are drawn"
                )

    def next_event(self) -> tuple[WorkerHandle, Any] | None:
        """What comes next; None if nothing does for a while.

        What a message says of its worker is in the handle already: an interrupt may lose the event.
        """
        if time.monotonic() - self._looked > _LOOK_EVERY:
            self._looked = time.monotonic()
            for worker in self.alive:
                worker.look(self.patience)
        try:
            worker, message = self.events.get(timeout=_EVENTS_EVERY)
        except queue.Empty:
            return None
        if isinstance(message, Warned):
            self.notices(message.text, message.text)
        elif isinstance(message, Ready):
            self.check()
        return worker, message

    # -- what one of them has to know ------------------------------------------------------------------------------

    def leader(self) -> WorkerHandle:
        """One that has loaded the model, and has nothing to do if there is such a one. Waits for the first."""
        while True:
            self.check()
            there = [worker for worker in self.alive if worker.loaded is not None]
            if there:
                return next((worker for worker in there if worker.free), there[0])
            self._event_between_calls()

    def everybody(self) -> None:
        """Waits for all that are not lost."""
        while any(worker.loaded is None for worker in self.alive):
            self._event_between_calls()
        self.check()

    def ask(self, function: Callable[..., Any], *given: Any) -> Any:
        """``function(generator, *given)``, as a worker finds it: another one where that one is lost."""
        question = Ask(next(self.numbers), Parcel.of((function, given), "a prompt or an option of this call"))
        asked: WorkerHandle | None = None
        while True:
            if asked is None or asked.dead:
                asked = self.leader()
                asked.begin(question)
            worker, answer = self._event_between_calls() or (None, None)
            if worker is not asked or getattr(answer, "call", None) != question.call:
                continue
            if isinstance(answer, Answered):
                return answer.value.open()
            if isinstance(answer, Failed) and answer.blame is not Blame.DEVICE:  # else another one is asked
                raise answer.opened()

    def _event_between_calls(self) -> tuple[WorkerHandle, Any] | None:
        event = self.next_event()
        if event is not None and isinstance(event[1], Died) and self.alive:
            worker, _ = event
            self.notices(f"lost {worker.number}", f"{worker.name} {worker.how_it_ended}: the pool goes on without it")
        return event

    # -- their end -------------------------------------------------------------------------------------------------

    def none_left(self) -> BaseException:
        """The error where no worker is left: the first one's, if what each has failed with is known."""
        errors = [worker.error for worker in self.workers if worker.error is not None]
        if errors and len(errors) == len(self.workers):
            return errors[0]
        ends = "; ".join(f"{worker.name} {worker.how_it_ended}" for worker in self.workers)
        error = PoolError(f"no process of the pool is left: {ends}")
        error.__cause__ = errors[0] if errors else None
        return error

    def end(self) -> None:
        """Close all, and see to it that no process is left."""
        if os.getpid() != self._owner:
            return
        for worker in self.workers:
            worker.tell_to_end()
        until = time.monotonic() + _SECONDS_TO_END
        for worker in self.workers:
            worker.wait(max(0.0, until - time.monotonic()))
