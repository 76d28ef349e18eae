"""The worker that is asked what one of them has to know: any that is there; another one where it is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import PoolError
from .crew import Crew, WorkerHandle
from .messages import Answered, Ask, Died, packed_for_worker

_EVENTS_EVERY = 0.5  # seconds, after which processes are looked after if nothing comes


class Lead:
    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._questions = 0

    def worker(self) -> WorkerHandle:
        """Waits for the first one that has loaded the model."""
        while True:
            for worker in self._crew.alive:
                if worker.ready:
                    return worker
            if not self._crew.alive:
                raise none_left(self._crew)
            self._next_event()

    def everybody(self) -> None:
        """Waits for all that are not lost."""
        while any(not worker.ready for worker in self._crew.alive):
            self._next_event()
        self.worker()

    def ask(self, function: Callable[..., Any], *given: Any, what: str = "this") -> Any:
        """``function(generator, *given)``, as the worker finds it. ``what``: what of the user's is sent."""
        self._questions += 1
        message = packed_for_worker(Ask(self._questions, function, given), what)
        asked: WorkerHandle | None = None
        while True:
            if asked is None or asked.dead:
                asked = self.worker()
                asked.at_work = True
                asked.post(message)
            event = self._next_event()
            if event is None or getattr(event[1], "question", None) != self._questions:
                continue
            asked.at_work = False
            answer = event[1]
            if isinstance(answer, Answered):
                return answer.value
            if not answer.fatal:
                raise answer.error

    def _next_event(self) -> tuple[WorkerHandle, Any] | None:
        event = self._crew.next_event(_EVENTS_EVERY)
        if event is not None and isinstance(event[1], Died) and self._crew.alive:
            worker, died = event
            self._crew.notices(f"lost {worker.number}", f"{worker.name} {died.why}: the pool goes on without it")
        return event


def none_left(crew: Crew) -> BaseException:
    """The error where no worker is left: what the first one failed with, if any had the time to say so."""
    if crew.errors:
        return crew.errors[0]
    return PoolError("no process of the pool is left: " + "; ".join(dict.fromkeys(crew.lost)))
