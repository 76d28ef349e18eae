"""The loop: next step, build, launch, collect. Several steps may be launched before the oldest is collected."""

from __future__ import annotations

import operator
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ..model.batch import ModelBatch
from ..model.batch_builder import BatchBuilder
from ..model.device_memory import is_out_of_memory
from ..model.runner import ModelRunner
from ..model.tensor_ranks import TensorRanks
from ..planning.base_scheduler import BaseScheduler, scheduler_name
from ..planning.requests_and_prefixes import FinishReason, Request
from ..planning.step import Step
from ..sampling.stopping import Endings
from .device_errors import name_what_ran
from .drafts.collect_drafted import collect_drafted
from .drafts.drafts import Drafts
from .flight import Flight
from .smaller_steps import SmallerSteps
from .timekeeper import Timekeeper


class Launcher(Protocol):
    """Runs a step and picks its tokens: at once, or ahead of the tokens that the host has seen."""

    @property
    def most_times(self) -> int:
        """The most times that the rows of a step may run in a row."""

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        """Start a step. The function that comes back waits for the tokens of ``sampling``, [samples, times].

        -1 stands for no token: the row had ended before, or the logits allow none.
        """

    def tokens_were_seen(self) -> None:
        """The host has taken down the tokens of the oldest step on its way."""

    def may_repeat(self, sampling: Sequence[Request]) -> bool:
        """After a launch that failed: whether it may be tried again. ``sampling``: as it was given."""

    def put_back(self, step: Step) -> None:
        """After a launch that failed: free memory, and put back what may have changed. No other step is on its way."""

    @property
    def replays(self) -> bool:
        """Whether the latest step went to the device as a CUDA graph."""

    @property
    def is_steady(self) -> bool:
        """Whether the latest step took as long as others will: nothing was captured, or is about to be."""


class AtOnce:
    """The host picks tokens, from logits that it waits for."""

    most_times = 1
    replays = False
    is_steady = True

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Callable[[torch.Tensor, Sequence[Request]], list[int]],
        timekeeper: Timekeeper,
        may_pick_again: Callable[[Sequence[Request]], bool] = lambda _: True,
        ranks: TensorRanks | None = None,
    ) -> None:
        self._ranks = ranks or TensorRanks()
        self.runner = runner
        self.sampler = sampler
        self.timekeeper = timekeeper
        self.may_pick_again = may_pick_again
        self._picking = False
        self._drafted: torch.Tensor | None = None  # [tokens, vocabulary] float32  logits of the latest step's drafts

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        with self.runner.surroundings():
            self._picking = False
            logits = self.runner.step(batch)
            self._picking = True
            self.timekeeper.switch("tokens")
            logits = self.runner.in_float32(logits)
            samples = len(sampling)
            self._drafted = logits[samples:] if batch.drafted else None
            tokens = self._picked(logits[:samples], sampling)
        return lambda: tokens

    def pick_drafted(self, rows: Sequence[int], requests: Sequence[Request]) -> np.ndarray:  # [requests, 1]
        """The next tokens of requests, from these rows of the logits of the latest step's drafts."""
        assert self._drafted is not None
        with self.runner.surroundings():
            return self._picked(
                self._drafted[torch.tensor(rows, dtype=torch.long, device=self._drafted.device)], requests
            )

    def _picked(self, logits: torch.Tensor, requests: Sequence[Request]) -> np.ndarray:  # [requests, 1]
        with self.runner.adapted():
            tokens = self.sampler(logits, requests) if requests else []
        tokens = self._ranks.of_first("picked tokens", tokens)
        return np.array(tokens, dtype=np.int64)[:, None]

    def tokens_were_seen(self) -> None:
        pass

    def may_repeat(self, sampling: Sequence[Request]) -> bool:
        return not self._picking or self.may_pick_again(sampling)

    def put_back(self, step: Step) -> None:
        self.runner.restore()


class Engine:
    """``depth``: launched steps after which the host waits for the oldest; a burst counts as many as it runs."""

    def __init__(
        self,
        scheduler: BaseScheduler,
        builder: BatchBuilder,
        launcher: Launcher,
        endings: Endings,
        depth: int,
        timekeeper: Timekeeper,
        smaller: SmallerSteps,
        jump: Callable[[Request], int] | None = None,  # appends what must come next, and says how many tokens
        drafts: Drafts | None = None,
    ) -> None:
        self.drafts = drafts
        self.jump = jump
        self.jumped = self.never_run = 0  # tokens; of those that were jumped to at an answer's limit none is run
        self.scheduler = scheduler
        self.builder = builder
        self.launcher = launcher
        self.endings = endings
        self.timekeeper = timekeeper
        self.smaller = smaller
        self.depth = depth if scheduler.runs_ahead else 1
        # Of bursts, one runs and one waits for its turn: with more, tokens would only be seen later.
        self.flights = 2 if launcher.most_times > 1 else depth
        # Called before each step with what it is, where several ranks run the model together.
        self.meet: Callable[[int], None] | None = None
        self.after_waiting: Callable[[], None] = lambda: None  # an error where the device's numbers mean nothing
        self.steps = 0
        self.model_tokens = 0
        self.idle_tokens = 0  # run for requests that had ended before

    def run(self, watch: Callable[[Step, int], None] | None = None) -> Iterator[Request]:
        """Requests as they finish. ``watch`` is told of each collected step, and of its number of new tokens."""
        flights: deque[Flight] = deque()
        switch = self.timekeeper.switch
        step: Step | None = None
        try:
            while True:
                switch("scheduling")
                # These go first: nothing is launched before, but for a step that has begun in parts.
                late = [] if self.smaller.waiting else self.endings.late()
                step = None if late else self._next(must_wait=bool(flights))
                if self.meet is not None:
                    self.meet(len(late) if step is None else step.number())
                finished: list[Request] = []
                if step is not None:
                    self._try(step, flights)
                elif late and not flights:
                    finished = self._out_of_time(late)
                elif not flights:
                    return
                if flights and (step is None or self._enough(flights)):
                    flight = flights[0]  # left in the queue: an interrupt in between must find it
                    idle, jumped, accepted = self.idle_tokens, self.jumped, 0
                    switch("model")
                    tokens = flight.wait()
                    self.after_waiting()
                    if self.drafts is None:
                        finished = self.collect(flight, tokens)
                    else:
                        finished, accepted = collect_drafted(self, self.drafts, flight, tokens)
                    flights.popleft()
                    self.launcher.tokens_were_seen()
                    self.timekeeper.collected(flight.record)
                    if watch is not None:
                        switch("outside")
                        watch(
                            flight.step,
                            sum(flight.counts) - (self.idle_tokens - idle) + (self.jumped - jumped) + accepted,
                        )
                if finished:
                    switch("results")
                    yield from finished
        except Exception as error:
            name_what_ran(error, [(flight.step, flight.replayed) for flight in flights], step, self.launcher.replays)
            raise
        finally:  # after an interrupt: launched steps may have run for requests that had ended
            for flight in flights:
                self.timekeeper.collected(flight.record)
                pairs = zip(flight.sampling, flight.counts, strict=True)
                self.idle_tokens += sum(count for request, count in pairs if request.done)

    def _enough(self, flights: deque[Flight]) -> bool:
        return len(flights) >= self.flights or sum(flight.step.times for flight in flights) >= self.depth

    def _next(self, must_wait: bool) -> Step | None:
        """The next step; None if there is none, or if launched steps must be seen first."""
        if self.smaller.waiting:
            part = None if must_wait else self.smaller.next(self.launcher.put_back)
            if must_wait or part is not None:
                return part
        drafts = self.drafts if self.smaller.most is None else None  # where memory is short, none
        if must_wait and (self.scheduler.must_know() or (drafts is not None and drafts.must_know)):
            return None
        step = self.scheduler.next()
        if step is None:
            return None
        most = self.launcher.most_times
        if drafts is not None:
            self.timekeeper.switch(drafts.counts_as)
            most = drafts.most_times(step, most)
            self.timekeeper.switch("scheduling")
        if most > 1 and not step.chunks:
            step.times = self._checked(self.scheduler.repeat(step, most), step, most)
        return self._next(must_wait) if self.smaller.cut(step) else step

    def _try(self, step: Step, flights: deque[Flight], may_draft: bool = True) -> None:
        """Launch a step. If it runs out of memory, its parts wait until all others have been seen."""
        drafts = self.drafts if may_draft and self.smaller.most is None else None
        drafted = step
        if drafts is not None:
            self.timekeeper.switch(drafts.counts_as)
            drafted = drafts.added(step)
            self.timekeeper.switch("scheduling")
        try:
            flights.append(self._launch(drafted))
        except Exception as error:
            may_repeat = drafted is not step and is_out_of_memory(error)
            if may_repeat and drafts is not None and self.launcher.may_repeat(step.sampling()):
                traceback.clear_frames(error.__traceback__)  # they hold tensors of the step
                drafts.too_large(drafted)
                self.launcher.put_back(step)
                return self._try(step, flights, may_draft=False)
            if not self.smaller.takes(error, step, lambda: self.launcher.may_repeat(step.sampling())):
                raise
        else:
            self.smaller.ran()

    def _launch(self, step: Step) -> Flight:
        began = time.perf_counter()
        batch = self.builder.build(step)
        sampling = step.sampling()
        counts = [1] * len(sampling) if step.times == 1 else [step.times_of(request) for request in sampling]
        self.timekeeper.switch(self.timekeeper.launching)
        wait = self.launcher.launch(batch, sampling)
        launched = time.perf_counter()
        self.timekeeper.switch("scheduling")
        for request, count in zip(sampling, counts, strict=True):
            request.expect(count)
        self.steps += step.times
        # With chunks, rows run once.
        decode_tokens = len(step.rows) if step.chunks else sum(counts)
        if self.drafts is not None and step.is_drafted:
            decode_tokens = step.tokens
            self.drafts.drafted += step.tokens - len(sampling)
        prompt_tokens = step.tokens - decode_tokens if step.chunks else 0
        self.model_tokens += prompt_tokens + decode_tokens
        record = self.timekeeper.launched(step.times, prompt_tokens, decode_tokens)
        if self.drafts is not None:
            self.drafts.launched(step)
        return Flight(
            step, sampling, counts, wait, record, self.launcher.replays, began, launched, self.launcher.is_steady
        )

    def _checked(self, times: Any, step: Step, most: int) -> int:
        """``times``, as ``repeat`` gave it. With a wrong number, rows would write to pages of others."""
        what = f"{scheduler_name(self.scheduler)}.repeat()"
        if not hasattr(times, "__index__") or not 1 <= operator.index(times) <= most:
            raise TypeError(f"{what} gave {times!r}: it must give a whole number from 1 to {most}")
        number: int = operator.index(times)  # NumPy's integers, too
        for request in step.rows:
            end = request.length + min(number, request.max_new_tokens - request.made) - 1
            if request.computed != end or len(request.pages) * self.builder.page_size < end - request.start:
                raise ValueError(
                    f"{what} gave {number}, so {request} needs pages up to position {end:,}, which its `computed` says"
                )
        return number

    def collect(self, flight: Flight, tokens: np.ndarray) -> list[Request]:
        """Give each request its tokens; those that end with them leave the cache."""
        assert tokens.shape == (len(flight.sampling), flight.step.times)
        self.timekeeper.switch("tokens")
        ends = self.endings.find(flight.sampling, flight.counts, tokens)
        self.timekeeper.switch("scheduling")
        finished: list[Request] = []
        once = flight.step.times == 1  # then numbers do: thousands of short lists would keep Python's collector busy
        seen = zip(flight.sampling, flight.counts, (tokens[:, 0] if once else tokens).tolist(), strict=True)
        for row, (request, count, new) in enumerate(seen):
            if request.finish_reason is not None:  # it had ended before this step, unknown when the step was launched
                self.idle_tokens += count
                continue
            if row in ends:
                has, reason = ends[row]
                self.idle_tokens += count - has
                request.extend(([new] if once else new)[:has], reason)
            elif once:
                request.take(new)
                if self.jump is not None and request.finish_reason is None:
                    forced = self.jump(request)
                    self.jumped += forced
                    self.never_run += forced if request.finish_reason is not None else 0
            else:
                request.extend(new[:count], None)
            if request.finish_reason is not None:
                finished.append(request)
        for request in finished:
            self.scheduler.finish(request)
        return finished

    def may_repeat(self, requests: Sequence[Request]) -> bool:
        """Whether their tokens may be picked once more, after a pick that failed."""
        return self.launcher.may_repeat(requests)

    def _out_of_time(self, late: list[Request]) -> list[Request]:
        """End requests whose time is over, with the tokens that they have. No launched step holds more of theirs."""
        for request in late:
            request.end(FinishReason.TIME)
            self.scheduler.finish(request)
            if self.drafts is not None:
                self.drafts.finished(request)
        return late
