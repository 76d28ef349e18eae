"""The loop and nothing else: next step, build, launch, collect; some steps are on their way at a time."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..model.batch import BatchBuilder, ModelBatch
from ..model.runner import ModelRunner, current_device
from ..planning.scheduler import Scheduler
from ..planning.step import Step
from ..planning.units import FinishReason, Request
from ..sampling.stopping import Endings
from .timekeeper import Stretch, Timekeeper


class Launcher(Protocol):
    """Has a step run and its tokens picked: at once, or ahead of what the host has seen."""

    @property
    def most_times(self) -> int:
        """How often the rows of a step may run in a row."""

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        """Start. What comes back waits for the tokens of ``sampling``, [samples, times], when it is called.

        -1 stands where there is none: the row had ended before, or there is no token to be had.
        """

    def back(self) -> None:
        """Results have been handed out, and whoever took them may have done anything meanwhile."""


class AtOnce:
    """Tokens are picked by the host, from logits that it waits for."""

    most_times = 1

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Callable[[torch.Tensor, Sequence[Request]], list[int]],
        timekeeper: Timekeeper,
    ) -> None:
        self.runner = runner
        self.sampler = sampler
        self.timekeeper = timekeeper

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        with current_device(self.runner.architecture.device):
            logits = self.runner.step(batch)
            self.timekeeper.switch("tokens")
            with self.runner.adapted():
                tokens = self.sampler(self.runner.in_float32(logits), sampling) if sampling else []
        return lambda: np.array(tokens, dtype=np.int64)[:, None]

    def back(self) -> None:
        """A step looks at everything anew."""


def runs_ahead(scheduler: Scheduler) -> bool:
    return getattr(scheduler, "runs_ahead", False) and callable(getattr(scheduler, "must_know", None))


@dataclass
class Flight:
    """A step on its way."""

    step: Step
    sampling: list[Request]
    counts: list[int]  # how many tokens each of them may get
    wait: Callable[[], np.ndarray]
    record: Stretch


class Engine:
    """``depth``: how many steps may be on their way before the host waits for the oldest, times in a row counted."""

    def __init__(
        self,
        scheduler: Scheduler,
        builder: BatchBuilder,
        launcher: Launcher,
        endings: Endings,
        depth: int,
        timekeeper: Timekeeper,
    ) -> None:
        self.scheduler = scheduler
        self.builder = builder
        self.launcher = launcher
        self.endings = endings
        self.timekeeper = timekeeper
        self.depth = depth if runs_ahead(scheduler) else 1
        # Where rows run several times, one step runs and one waits for its turn: more would only be looked at later.
        self.flights = 2 if launcher.most_times > 1 else depth
        self.steps = 0
        self.model_tokens = 0
        self.idle_tokens = 0  # of requests that turned out to have ended before

    def run(self, watch: Callable[[Step, int], None] | None = None) -> Iterator[Request]:
        """Requests as they finish, until there are none.

        ``watch`` is told of every step that has been run, and how many tokens of answers it brought.
        """
        flights: deque[Flight] = deque()
        switch = self.timekeeper.switch
        try:
            while True:
                switch("scheduling")
                late = self.endings.late()  # nothing is launched before they have been let go
                step = None if late else self._next(must_wait=bool(flights))
                finished: list[Request] = []
                if step is not None:
                    flights.append(self._launch(step))
                elif late and not flights:
                    finished = self._out_of_time(late)
                elif not flights:
                    return
                if flights and (step is None or self._enough(flights)):
                    flight = flights[0]  # where an interrupt, or an error of a criterion, finds it still on its way
                    idle = self.idle_tokens
                    switch("model")
                    finished = self.collect(flight, flight.wait())
                    flights.popleft()
                    self.timekeeper.collected(flight.record)
                    if watch is not None:
                        switch("outside")
                        watch(flight.step, sum(flight.counts) - (self.idle_tokens - idle))
                if finished:
                    switch("results")
                    yield from finished
                    self.launcher.back()
        finally:  # left half-way, it may have run more for those that had ended
            for flight in flights:
                self.timekeeper.collected(flight.record)
                pairs = zip(flight.sampling, flight.counts, strict=True)
                self.idle_tokens += sum(count for request, count in pairs if request.done)

    def _enough(self, flights: deque[Flight]) -> bool:
        return len(flights) >= self.flights or sum(flight.step.times for flight in flights) >= self.depth

    def _next(self, must_wait: bool) -> Step | None:
        """The next step; None if what is on its way must be seen first, or if there is none."""
        if must_wait and self.scheduler.must_know():  # type: ignore[attr-defined]
            return None
        return self.scheduler.next()

    def _launch(self, step: Step) -> Flight:
        repeat, most = getattr(self.scheduler, "repeat", None), self.launcher.most_times
        if most > 1 and not step.chunks and repeat is not None:
            step.times = self._checked(repeat(step, most), step, most)
        batch = self.builder.build(step)
        sampling = step.sampling()
        counts = [step.times_of(request) for request in sampling]
        self.timekeeper.switch(self.timekeeper.launching)
        wait = self.launcher.launch(batch, sampling)
        self.timekeeper.switch("scheduling")
        for request, count in zip(sampling, counts, strict=True):
            request.expect(count)
        self.steps += step.times
        # With chunks, rows run once.
        decode_tokens = len(step.rows) if step.chunks else sum(counts)
        prompt_tokens = step.tokens - len(step.rows)
        self.model_tokens += prompt_tokens + decode_tokens
        return Flight(step, sampling, counts, wait, self.timekeeper.launched(step.times, prompt_tokens, decode_tokens))

    def _checked(self, times: Any, step: Step, most: int) -> int:
        """What ``repeat`` gave: with another number, rows would run over pages that are not theirs."""
        what = f"{type(self.scheduler).__name__}.repeat()"
        if not hasattr(times, "__index__") or not 1 <= operator.index(times) <= most:
            raise TypeError(f"{what} gave {times!r}: it must give a whole number from 1 to {most}")
        times = operator.index(times)  # NumPy's integers, too
        for request in step.rows:
            end = request.length + min(times, request.max_new_tokens - request.made) - 1
            if request.computed != end or len(request.pages) * self.builder.page_size < end - request.start:
                raise ValueError(
                    f"{what} gave {times}, so {request} needs pages up to position {end:,}, which its `computed` says"
                )
        return times

    def collect(self, flight: Flight, tokens: np.ndarray) -> list[Request]:
        """Give each request its tokens; those that end with them leave the cache."""
        assert tokens.shape == (len(flight.sampling), flight.step.times)
        self.timekeeper.switch("tokens")
        ends = self.endings.find(flight.sampling, flight.counts, tokens)
        self.timekeeper.switch("scheduling")
        finished = []
        for row, (request, count, new) in enumerate(zip(flight.sampling, flight.counts, tokens.tolist(), strict=True)):
            if request.done:  # it had ended before this step, which nobody knew when it was launched
                self.idle_tokens += count
                continue
            has, reason = ends.get(row, (count, None))
            request.extend(new[:has], reason)
            self.idle_tokens += count - has
            if request.done:
                finished.append(request)
        for request in finished:
            self.scheduler.finish(request)
        return finished

    def _out_of_time(self, late: list[Request]) -> list[Request]:
        """They keep the tokens that they have, if they have begun at all; nothing of theirs is on its way."""
        for request in late:
            request.end(FinishReason.TIME)
            self.scheduler.finish(request)
        return late
