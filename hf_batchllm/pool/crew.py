"""The workers of a pool, as the pool sees them: all of them, and what comes from them."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, PoolError
from ..notices import Notices
from ..python_child import CannotStart
from ..wording import differing
from .devices import WorkerDevice
from .messages import Died, Load, Parcel, Ready, Warned
from .worker_handle import WorkerHandle

_LOOK_EVERY = 1.0  # seconds
_SECONDS_TO_END = 10.0


@dataclass(frozen=True)
class Loss:
    """A worker that is gone. ``error``: what it failed with, if it had the time to say so."""

    worker: str
    why: str
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.worker} {self.why}"


class Crew:
    def __init__(
        self,
        devices: Sequence[WorkerDevice],
        load: Callable[[WorkerDevice], Callable[[], Any]],  # what gives the generator on each
        patience: float,  # seconds in which a step has to end
        notices: Notices,
    ) -> None:
        if os.name != "posix":
            raise ConfigError("a pool of processes needs Linux or macOS")
        self.patience = patience
        self.notices = notices
        self.events: queue.SimpleQueue[tuple[WorkerHandle, Any]] = queue.SimpleQueue()
        self.loaded: Ready | None = None  # what the first one has loaded
        self.losses: list[Loss] = []
        self._owner = os.getpid()
        self._looked = time.monotonic()
        loads = {device: Parcel.of(load(device), "what loads the model") for device in set(devices)}
        said: dict[str, int] = {}  # lines, and which worker printed each first: the others' are the same
        self.workers: list[WorkerHandle] = []
        try:
            for number, device in enumerate(devices):
                self.workers.append(WorkerHandle(number, device, devices, self.events, said))
            for worker in self.workers:
                worker.begin(Load(loads[worker.device]))
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

    def next_event(self, seconds: float) -> tuple[WorkerHandle, Any] | None:
        """What comes next; None if nothing does for so long.

        What a message says of its worker is in the handle already: an interrupt may lose the event.
        """
        if time.monotonic() - self._looked > _LOOK_EVERY:
            self._looked = time.monotonic()
            for worker in self.alive:
                worker.look(self.patience)
        try:
            worker, message = self.events.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(message, Warned):
            self.notices(message.text, message.text)
        elif isinstance(message, Died):
            self.losses.append(Loss(worker.name, message.why, worker.error))
        elif isinstance(message, Ready):
            self.check()
        return worker, message

    def none_left(self) -> BaseException:
        """The error where no worker is left: what the last one failed with, if that is known."""
        known = [Loss(each.name, each.how_it_ended, each.error) for each in self.workers]
        if known and all(loss.error is not None for loss in known):
            return next(loss.error for loss in known if loss.error is not None)
        error = PoolError("no process of the pool is left: " + "; ".join(map(str, known)))
        error.__cause__ = next((loss.error for loss in known if loss.error is not None), None)
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
