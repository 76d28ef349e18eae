"""The loop: next step, build, launch, collect. Several steps may be launched before the oldest is collected.

Features come in from the side. A grammar masks logits before a token is picked from them, and the host makes the mask
(`sampling/grammar_masks.py`). It has to see the token before, so the launcher of such a call has no bursts, and at most
two steps on their way (`launchers.py`). The runner hands the model the images of a step (`model/image_features.py`). An
interrupt is noted when it comes, and raised in the model's next layer, or here before the next step (`interrupts.py`).
"""

from __future__ import annotations

import operator
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ..interrupts import act_on_interrupts
from ..model.batch import ModelBatch
from ..model.batch_builder import BatchBuilder
from ..planning.base_scheduler import BaseScheduler, scheduler_name
from ..planning.claims import Claims
from ..planning.paged_cache import PagedCache
from ..planning.requests_and_prefixes import FinishReason, Request
from ..planning.step import Step
from ..sampling.stopping import Endings
from .device_errors import name_what_ran
from .smaller_steps import SmallerSteps
from .timekeeper import Stretch, Timekeeper

Watch = Callable[[Step, int], None]
"""Is told of each collected step, and of its number of new tokens."""


class Launcher(ABC):
    """Runs a step and picks its tokens: at once, or ahead of the tokens that the host has seen.

    One that runs ahead keeps the last token of each row on the device, where the next step finds it.
    """

    @property
    def most_times(self) -> int:
        """The most times that the rows of a step may run in a row."""
        return 1

    @abstractmethod
    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], Any]:
        """Start a step. The function that comes back waits for what the collector is given.

        Mostly these are the tokens of ``sampling``, [samples, times]. -1 stands for no token: the row had ended before,
        or the logits allow none.
        """

    def tokens_were_seen(self) -> None:  # noqa: B027 -- most need not know
        """The host has taken down the tokens of the oldest step on its way."""

    @abstractmethod
    def may_repeat(self, sampling: Sequence[Request]) -> bool:
        """After a launch that failed: whether it may be tried again. ``sampling``: as it was given."""

    @abstractmethod
    def put_back(self, step: Step) -> None:
        """After a launch that failed: free memory, and put back what may have changed. No other step is on its way."""

    def start(self, requests: Sequence[Request], most_rows: int) -> None:  # noqa: B027 -- likewise
        """The call begins, or the turn of the next adapter, with these requests; a step has at most ``most_rows``."""

    def user_had_control(self) -> None:  # noqa: B027 -- likewise
        """Code of the user's has run: it may have put other memory below the model's weights."""

    def close(self) -> None:  # noqa: B027 -- most hold nothing
        """The call is over."""

    @property
    def replays(self) -> bool:
        """Whether the latest step went to the device as a CUDA graph."""
        return False

    @property
    def is_steady(self) -> bool:
        """Whether the latest step took as long as others will: nothing was captured, or is about to be."""
        return True

    @property
    def capture_seconds(self) -> float:
        """What capturing graphs took."""
        return 0.0

    @property
    def summary(self) -> str:
        """A sentence for the report; empty where there are no graphs."""
        return ""


@dataclass
class InFlightStep:
    """A step that was launched and not collected yet."""

    step: Step
    counts: list[int]  # the most tokens of each request that it samples
    wait: Callable[[], Any]
    record: Stretch
    replayed: bool  # as a CUDA graph
    began: float  # by the clock of time.perf_counter
    launched: float  # by the same clock
    steady: bool = True  # whether other steps take as long: nothing was captured meanwhile


class Collector(ABC):
    """What steps are to the requests of a call, and what comes of them. ``answers``: those that the call gives back."""

    idle_tokens = 0  # run for requests that had ended before

    def __init__(
        self, answers: Sequence[Request], scheduler: BaseScheduler, endings: Endings, timekeeper: Timekeeper
    ) -> None:
        self.answers = answers
        self.scheduler = scheduler
        self.endings = endings
        self.timekeeper = timekeeper

    @property
    @abstractmethod
    def decoded(self) -> int:
        """How many tokens that are no prompt's were run for the first time, idle ones not counted."""

    @property
    def recomputed(self) -> int:
        """How many tokens that are no prompt's were run again, as far as the cache does not know of it."""
        return 0

    @property
    def drafted(self) -> tuple[int, int, float]:
        """How many tokens were guessed, how many guesses were right, and the seconds that these saved."""
        return 0, 0, 0.0

    @abstractmethod
    def launched(self, step: Step, counts: Sequence[int]) -> None:
        """A step is on its way. ``counts``: as ``InFlightStep`` has them."""

    @abstractmethod
    def collect(self, running: InFlightStep, found: Any) -> tuple[list[Request], int]:
        """Take down what the launcher has found. Gives the answers that end, and how many new tokens there are."""

    @abstractmethod
    def out_of_time(self, late: list[Request]) -> list[Request]:
        """End requests whose time is over. No launched step holds tokens of theirs. Gives the answers that end."""

    def broke_off(self, running: InFlightStep) -> None:  # noqa: B027 -- no beam ends unseen
        """The call ends while the step is on its way."""


class Engine:
    """``depth``: launched steps after which the host waits for the oldest; a burst counts as many as it runs."""

    def __init__(
        self,
        scheduler: BaseScheduler,
        builder: BatchBuilder,
        launcher: Launcher,
        collector: Collector,
        depth: int,
        timekeeper: Timekeeper,
        smaller: SmallerSteps,
        schedulers_turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._schedulers_turn = schedulers_turn  # while the scheduler is asked, where that is the user's
        self.scheduler = scheduler
        self.builder = builder
        self.launcher = launcher
        self.collector = collector
        self.timekeeper = timekeeper
        self.smaller = smaller
        self.depth = depth if scheduler.runs_ahead else 1
        # Of bursts, one runs and one waits for its turn: with more, tokens would only be seen later.
        self.most_in_flight = 2 if launcher.most_times > 1 else depth
        self.after_waiting: Callable[[], None] = lambda: None  # an error where what has come means nothing
        self.steps = 0
        self.model_tokens = 0
        self._begun = False
        self._preemptions = 0  # of earlier turns, where the scheduler counts anew

    def start(
        self, requests: Sequence[Request], cache: PagedCache, step_tokens: int, claims: Claims | None = None
    ) -> None:
        """The scheduler begins with these requests: all of the call's, or those of one adapter's turn."""
        scheduler, before = self.scheduler, self.preemptions if self._begun else 0
        self._begun, scheduler.claims = True, claims
        if claims is not None and not scheduler.asks_claims:
            requests = [request for request in requests if _claimed(request, claims, cache)]
        scheduler.start(requests, cache, step_tokens)
        if self.smaller.most is not None:
            scheduler.limit_steps(self.smaller.most)
        self._preemptions = max(self._preemptions, before - scheduler.preemptions)
        self.launcher.start(requests, step_tokens)

    @property
    def preemptions(self) -> int:
        return self._preemptions + self.scheduler.preemptions

    def check_finished(self) -> None:
        if any(not request.done for request in self.collector.answers):
            name = scheduler_name(self.scheduler)
            raise RuntimeError(f"{name} ended the call before every request had finished")

    def run(self, watch: Watch | None = None) -> Iterator[Request]:
        """Answers as they finish."""
        queue: deque[InFlightStep] = deque()
        switch = self.timekeeper.switch
        step: Step | None = None
        try:
            while True:
                act_on_interrupts()
                switch("scheduling")
                # Requests whose time is over end before more is launched, unless a step has begun in parts.
                late = [] if self.smaller.waiting else self.collector.endings.late()
                with self._schedulers_turn():
                    step = None if late else self._next(in_flight=bool(queue))
                finished: list[Request] = []
                if step is not None:
                    self._try(step, queue)
                elif late and not queue:
                    with self._schedulers_turn():
                        finished = self.collector.out_of_time(late)
                elif not queue:
                    return
                if queue and (step is None or self._enough(queue)):
                    running = queue[0]  # left in the queue: an error in between must find it
                    switch("model")
                    found = running.wait()
                    self.after_waiting()
                    finished, new_tokens = self.collector.collect(running, found)
                    queue.popleft()
                    self.launcher.tokens_were_seen()
                    self.timekeeper.collected(running.record)
                    if watch is not None:
                        switch("outside")
                        watch(running.step, new_tokens)
                if finished:
                    switch("results")
                    yield from finished
        except Exception as error:
            name_what_ran(error, [(running.step, running.replayed) for running in queue], step, self.launcher.replays)
            raise
        finally:  # after an interrupt: launched steps may have run for requests that had ended
            for running in queue:
                self.timekeeper.collected(running.record)
                self.collector.broke_off(running)

    def _enough(self, queue: deque[InFlightStep]) -> bool:
        return len(queue) >= self.most_in_flight or sum(running.step.times for running in queue) >= self.depth

    def _next(self, in_flight: bool) -> Step | None:
        """The next step; None if there is none, or if launched steps must be seen first."""
        if self.smaller.waiting:
            part = None if in_flight else self.smaller.next(self.launcher.put_back)
            if in_flight or part is not None:
                return part
        if in_flight and self.scheduler.must_know():
            return None
        step = self.scheduler.next()
        if step is None:
            return None
        most = self.launcher.most_times
        if most > 1 and not step.chunks:
            step.times = self._checked(self.scheduler.repeat(step, most), step, most)
        return self._next(in_flight) if self.smaller.cut(step) else step

    def _try(self, step: Step, queue: deque[InFlightStep]) -> None:
        """Launch a step. If it runs out of memory, its parts wait until all others have been seen."""
        try:
            queue.append(self._launch(step))
        except Exception as error:
            with self._schedulers_turn():  # the scheduler is told to make smaller steps
                taken = self.smaller.takes(error, step, lambda: self.launcher.may_repeat(step.sampling()))
            if not taken:
                raise
        else:
            with self._schedulers_turn():
                self.smaller.ran()

    def _launch(self, step: Step) -> InFlightStep:
        began = time.perf_counter()
        batch = self.builder.build(step)
        sampling = step.sampling()
        counts = [1] * len(sampling) if step.times == 1 else [step.times_of(request) for request in sampling]
        self.timekeeper.switch(self.timekeeper.launching)
        wait = self.launcher.launch(batch, sampling)
        launched = time.perf_counter()
        self.timekeeper.switch("scheduling")
        self.collector.launched(step, counts)
        # A step that runs several times has rows alone.
        tokens, prompt_tokens = step.tokens + sum(counts) - len(counts), step.prompt_tokens
        self.steps += step.times
        self.model_tokens += tokens
        record = self.timekeeper.launched(step.times, prompt_tokens, tokens - prompt_tokens)
        launcher = self.launcher
        return InFlightStep(step, counts, wait, record, launcher.replays, began, launched, launcher.is_steady)

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


def _claimed(request: Request, claims: Claims, cache: PagedCache) -> bool:
    """For a scheduler that does not ask."""
    if claims.take(request.index):
        return True
    request.end(FinishReason.WITHDRAWN)
    cache.retire(request)
    return False
