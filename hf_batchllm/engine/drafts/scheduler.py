"""A scheduler whose steps get drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ...planning.base_scheduler import BaseScheduler, WrappedScheduler
from ...planning.paged_cache import PagedCache
from ...planning.requests_and_prefixes import Request
from ...planning.step import Step
from ..timekeeper import Timekeeper
from .drafts import Drafts


class DraftingScheduler(WrappedScheduler):
    """The steps of ``inner``, with drafts where they pay. While memory is so short that steps are smaller, none do."""

    def __init__(self, inner: BaseScheduler, drafts: Drafts, timekeeper: Timekeeper) -> None:
        super().__init__(inner)
        self.asks_claims = inner.asks_claims
        self._drafts = drafts
        self._timekeeper = timekeeper
        self._memory_is_short = False

    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        self.inner.claims = self.claims
        super().start(requests, cache, max_batch_tokens)

    def must_know(self) -> bool:
        return super().must_know() or (self._drafts.must_know and not self._memory_is_short)

    def next(self) -> Step | None:
        step = super().next()
        if step is None or self._memory_is_short:
            return step
        with self._timekeeper.during(self._drafts.counts_as):
            drafted = self._drafts.added(step)
        if drafted is not step:
            drafted.instead = partial(self._without, drafted, step)
        return drafted

    def _without(self, drafted: Step, step: Step) -> Step:
        self._drafts.too_large(drafted)
        return step

    def repeat(self, step: Step, most: int) -> Any:
        return 1 if step.is_drafted else super().repeat(step, most)

    def limit_steps(self, tokens: int | None) -> None:
        self._memory_is_short = tokens is not None
        super().limit_steps(tokens)

    def finish(self, request: Request) -> None:
        super().finish(request)
        self._drafts.finished(request)
