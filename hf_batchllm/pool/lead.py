"""The worker that is asked what one of them has to know: any that is there; another one where it is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .crew import Crew
from .messages import Answered, Ask, Blame, Died, Failed, Parcel
from .worker_handle import WorkerHandle

_EVENTS_EVERY = 0.5  # seconds, after which processes are looked after if nothing comes


class Lead:
    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._questions = 0

    def worker(self) -> WorkerHandle:
        """One that has loaded the model, and has nothing to do if there is such a one. Waits for the first."""
        while True:
            self._crew.check()
            there = [worker for worker in self._crew.alive if worker.ready]
            if there:
                return next((worker for worker in there if worker.free), there[0])
            self._next_event()

    def everybody(self) -> None:
        """Waits for all that are not lost."""
        while any(not worker.ready for worker in self._crew.alive):
            self._next_event()
        self._crew.check()

    def ask(self, function: Callable[..., Any], *given: Any, what: str = "this") -> Any:
        """``function(generator, *given)``, as the worker finds it. ``what``: what of the user's is sent."""
        content = Parcel.of((function, given), what)
        self._questions += 1
        asked: WorkerHandle | None = None
        while True:
            if asked is None or asked.dead:
                asked = self.worker()
                asked.begin(Ask(self._questions, content))
            event = self._next_event()
            if event is None or event[0] is not asked or getattr(event[1], "question", None) != self._questions:
                continue
            answer = event[1]
            if isinstance(answer, Answered):
                return answer.value.open()
            if isinstance(answer, Failed) and answer.blame is not Blame.DEVICE:  # else another one is asked
                raise answer.opened()

    def _next_event(self) -> tuple[WorkerHandle, Any] | None:
        event = self._crew.next_event(_EVENTS_EVERY)
        if event is not None and isinstance(event[1], Died) and self._crew.alive:
            worker, died = event
            self._crew.notices(f"lost {worker.number}", f"{worker.name} {died.why}: the pool goes on without it")
        return event
