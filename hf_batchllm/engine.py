"""The loop and nothing else: next step, build, run, collect."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .batch import BatchBuilder
from .request import Request, Step
from .runner import ModelRunner
from .sampling import Sampler
from .scheduler import Scheduler


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        builder: BatchBuilder,
        runner: ModelRunner,
        sampler: Sampler,
        stop_tokens: frozenset[int],
    ) -> None:
        self.scheduler = scheduler
        self.builder = builder
        self.runner = runner
        self.sampler = sampler
        self.stop_tokens = stop_tokens
        self.steps = 0
        self.model_tokens = 0

    def run(self, watch: Callable[[Step], None] | None = None) -> Iterator[Request]:
        """Requests as they finish, until there are none. ``watch`` is told of every step that has been run."""
        while (step := self.scheduler.next()) is not None:
            batch = self.builder.build(step)
            logits = self.runner.step(batch)
            self.steps += 1
            self.model_tokens += step.tokens
            if watch is not None:
                watch(step)
            yield from self.collect(step, logits)

    def collect(self, step: Step, logits: torch.Tensor) -> list[Request]:
        """Give each request its token; those that end with it leave the cache."""
        sampling = step.sampling()
        if not sampling:
            return []
        for request, token in zip(sampling, self.sampler(logits, sampling), strict=True):
            request.append(token, token in self.stop_tokens)
        finished = [request for request in sampling if request.done]
        for request in finished:
            self.scheduler.finish(request)
        return finished
