"""What comes of the steps of a call that picks tokens, or looks scores up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..planning.requests_and_prefixes import FinishReason, Request
from ..planning.step import Step
from .loop import Collector, InFlightStep


class TokenCollector(Collector):
    """Gives each request its tokens. ``jump``: appends what must come next to one, and says how many tokens."""

    def __init__(
        self,
        *given: Any,
        jump: Callable[[Request], int] | None = None,
        criterias_turn: Callable[[], AbstractContextManager[None]] = nullcontext,
        schedulers_turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(*given)
        self.jump = jump
        self._criterias_turn = criterias_turn  # while the user's criteria are asked, if there are any
        self._schedulers_turn = schedulers_turn  # while the scheduler is told, where that is the user's
        self.never_run = 0  # tokens that were jumped to at an answer's limit

    @property
    def decoded(self) -> int:
        return sum(max(request.made - 1, 0) for request in self.answers) - self.never_run

    def out_of_time(self, late: list[Request]) -> list[Request]:
        for request in late:
            request.end(FinishReason.TIME)
            self.scheduler.finish(request)
        return late

    def launched(self, step: Step, counts: Sequence[int]) -> None:
        for request, count in zip(step.sampling(), counts, strict=True):
            request.expect(count)

    def broke_off(self, running: InFlightStep) -> None:
        pairs = zip(running.step.sampling(), running.counts, strict=True)
        self.idle_tokens += sum(count for request, count in pairs if request.done)

    def collect(self, running: InFlightStep, tokens: np.ndarray) -> tuple[list[Request], int]:
        """Give each request its tokens; those that end with them leave the cache."""
        sampling = running.step.sampling()
        assert tokens.shape == (len(sampling), running.step.times)
        self.timekeeper.switch("tokens")
        with self._criterias_turn():
            ends = self.endings.find(sampling, running.counts, tokens)
        self.timekeeper.switch("scheduling")
        finished: list[Request] = []
        idle = jumped = 0
        once = running.step.times == 1  # then numbers do: thousands of short lists would keep Python's collector busy
        seen = zip(sampling, running.counts, (tokens[:, 0] if once else tokens).tolist(), strict=True)
        for row, (request, count, new) in enumerate(seen):
            if request.finish_reason is not None:  # it had ended before this step, unknown when the step was launched
                idle += count
                continue
            if row in ends:
                has, reason = ends[row]
                idle += count - has
                request.extend(([new] if once else new)[:has], reason)
            elif once:
                request.take(new)
                if self.jump is not None and request.finish_reason is None:
                    forced = self.jump(request)
                    jumped += forced
                    self.never_run += forced if request.finish_reason is not None else 0
            else:
                request.extend(new[:count], None)
            if request.finish_reason is not None:
                finished.append(request)
        self.idle_tokens += idle
        with self._schedulers_turn() if finished else nullcontext():
            for request in finished:
                self.scheduler.finish(request)
        return finished, sum(running.counts) - idle + jumped
