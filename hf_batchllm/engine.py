"""The loop and nothing else: next step, build, launch, collect; ``depth`` steps on their way at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .batch import BatchBuilder, ModelBatch
from .request import Request, Step
from .runner import ModelRunner, current_device
from .sampling import NO_DISTRIBUTION
from .scheduler import Scheduler


class Launcher(Protocol):
    """Has a step run and its tokens picked: at once, or ahead of what the host has seen."""

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], list[int]]:
        """Start. What comes back waits for the tokens of ``sampling`` when it is called."""

    def back(self) -> None:
        """Results have been handed out, and whoever took them may have done anything meanwhile."""


class AtOnce:
    """Tokens are picked by the host, from logits that it waits for."""

    def __init__(self, runner: ModelRunner, sampler: Callable[[torch.Tensor, Sequence[Request]], list[int]]) -> None:
        self.runner = runner
        self.sampler = sampler

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], list[int]]:
        with current_device(self.runner.architecture.device):
            logits = self.runner.step(batch)
            tokens = self.sampler(logits, sampling) if sampling else []
        return lambda: tokens

    def back(self) -> None:
        """A step looks at everything anew."""


def runs_ahead(scheduler: Scheduler) -> bool:
    return getattr(scheduler, "runs_ahead", False) and callable(getattr(scheduler, "must_know", None))


@dataclass
class Flight:
    """A step on its way."""

    step: Step
    sampling: list[Request]
    wait: Callable[[], list[int]]


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        builder: BatchBuilder,
        launcher: Launcher,
        stop_tokens: frozenset[int],
        depth: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.builder = builder
        self.launcher = launcher
        self.stop_tokens = stop_tokens
        self.depth = depth if runs_ahead(scheduler) else 1
        self.steps = 0
        self.model_tokens = 0
        self.idle_tokens = 0  # of requests that turned out to have ended before

    def run(self, watch: Callable[[Step, int], None] | None = None) -> Iterator[Request]:
        """Requests as they finish, until there are none.

        ``watch`` is told of every step that has been run, and how many tokens of answers it brought.
        """
        flights: deque[Flight] = deque()
        try:
            while True:
                step = self._next(must_wait=bool(flights))
                if step is not None:
                    flights.append(self._launch(step))
                elif not flights:
                    return
                if step is None or len(flights) >= self.depth:
                    flight = flights.popleft()
                    tokens = flight.wait()
                    idle = self.idle_tokens
                    finished = self.collect(flight, tokens)
                    if watch is not None:
                        watch(flight.step, len(tokens) - (self.idle_tokens - idle))
                    if finished:
                        yield from finished
                        self.launcher.back()
        finally:  # left half-way, it may have run more for those that had ended
            self.idle_tokens += sum(request.done for flight in flights for request in flight.sampling)

    def _next(self, must_wait: bool) -> Step | None:
        """The next step; None if what is on its way must be seen first, or if there is none."""
        if must_wait and self.scheduler.must_know():  # type: ignore[attr-defined]
            return None
        return self.scheduler.next()

    def _launch(self, step: Step) -> Flight:
        batch = self.builder.build(step)
        sampling = step.sampling()
        wait = self.launcher.launch(batch, sampling)
        for request in sampling:
            request.expect()
        self.steps += 1
        self.model_tokens += step.tokens
        return Flight(step, sampling, wait)

    def collect(self, flight: Flight, tokens: list[int]) -> list[Request]:
        """Give each request its token; those that end with it leave the cache."""
        finished = []
        for request, token in zip(flight.sampling, tokens, strict=True):
            if request.done:  # it had ended before this step, which nobody knew when it was launched
                self.idle_tokens += 1
                continue
            if token < 0:
                raise RuntimeError(NO_DISTRIBUTION)
            request.append(token, token in self.stop_tokens)
            if request.done:
                finished.append(request)
        for request in finished:
            self.scheduler.finish(request)
        return finished
