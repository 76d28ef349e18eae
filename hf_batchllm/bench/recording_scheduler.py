"""A scheduler around another one that keeps a record of its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..planning.base_scheduler import BaseScheduler
from ..planning.paged_cache import PagedCache
from ..planning.requests_and_prefixes import Request
from ..planning.step import Step


@dataclass(frozen=True)
class StepSize:
    """How large a step of the engine was."""

    rows: int  # decode rows
    chunk_tokens: int  # prompt tokens
    samples: int  # rows that went through the LM head

    @classmethod
    def of(cls, step: Step) -> StepSize:
        return cls(len(step.rows), step.tokens - len(step.rows), len(step.sampling()))


class RecordingScheduler(BaseScheduler):
    """Keeps a record of the steps that another scheduler makes.

    ``answers``: the length of each answer, if they differ. ``generate()`` takes one limit for the whole list, but a
    scheduler sees the requests before they run and can shorten each.
    """

    def __init__(self, inner: BaseScheduler) -> None:
        self.inner = inner
        self.runs_ahead = inner.runs_ahead
        self.takes_jumps = inner.takes_jumps
        self.sizes: list[StepSize] = []
        self.answers: Sequence[int] | None = None
        self.most_running = 0  # the most requests at once
        self.prompts_until = 0  # wall clock in ns: when the last step with prompt tokens was handed out

    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        self.sizes = []
        self.most_running = 0
        if self.answers is not None:
            for request in requests:
                request.max_new_tokens = self.answers[request.index]
        self.inner.start(requests, cache, max_batch_tokens)

    def next(self) -> Step | None:
        step = self.inner.next()
        self.most_running = max(self.most_running, len(getattr(self.inner, "running", ())))
        if step is not None:
            self.sizes.append(StepSize.of(step))
            if step.chunks:
                self.prompts_until = time.time_ns()
        return step

    def finish(self, request: Request) -> None:
        self.inner.finish(request)

    @property
    def preemptions(self) -> int:  # type: ignore[override]
        return self.inner.preemptions

    def must_know(self) -> bool:
        return self.inner.must_know()

    def repeat(self, step: Step, most: int) -> int:
        times = self.inner.repeat(step, most)
        self.sizes += [StepSize.of(step)] * (times - 1)
        return times
