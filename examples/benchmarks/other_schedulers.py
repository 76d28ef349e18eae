"""Schedulers that do less than the library's, or do it as it was once done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import common  # noqa: F401  before hf_batchllm: finds the checkout

from hf_batchllm.planning.expected_length import ExpectedLength
from hf_batchllm.planning.memory_forecast import Forecast
from hf_batchllm.planning.paged_cache import PagedCache
from hf_batchllm.planning.requests_and_prefixes import FinishReason, Prefix, Request
from hf_batchllm.planning.scheduler import GroupScheduler
from hf_batchllm.planning.step import Chunk, Step


class PrefixesFirst(GroupScheduler):
    """A prompt waits for the step after the one that computes its prefix."""

    def _fill(self, request: Request, step: Step, budget: int) -> int:
        # A request waits only for a chunk of this very step, so no step is empty because of it.
        fresh = {chunk.unit for chunk in step.chunks}
        used = 0
        for unit, end in [*request.ancestors(), (request, request.length)]:
            count = min(end - unit.computed, budget - used)
            if count > 0:
                step.chunks.append(Chunk(unit, unit.computed, unit.computed + count))
                unit.computed += count
                used += count
            if count > 0 or unit.computed < end or unit in fresh:
                break
        return used


class InListOrder(GroupScheduler):
    """Requests are admitted in the order of the list. Decode rows still stand in the order of the plan, and share.

    The readers of a prefix then do not follow each other. If memory is short, a prefix without a running reader makes
    room for the next request, as in engines without a plan; otherwise it would stay until its last reader has come.
    Requests are also admitted at their longest, as no plan says when prefixes end.
    """

    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        super().start(requests, cache, max_batch_tokens)
        below = [unit for request in requests for unit, _ in request.ancestors()]
        self._prefixes = [unit for unit in dict.fromkeys(below) if isinstance(unit, Prefix)]

    def _ordered(self, requests: Sequence[Request]) -> Iterable[Request]:
        return sorted(requests, key=lambda request: (request.index, request.sample))

    def _fits(self, request: Request, forecast: Forecast) -> bool:
        if not self.running:
            return super()._fits(request, forecast)
        # A prefix does not end with its running readers: others still need it.
        needed = self.cache.missing_with_ancestors(request, request.max_length) + forecast.most_new_pages
        if self._could_have(needed) and self.cache.evict(needed):
            return True
        chain = [unit for unit, _ in request.ancestors() if isinstance(unit, Prefix)]
        for prefix in chain:  # the newcomer's own prefixes stay
            prefix.running += 1
        try:
            idle = sum(len(prefix.pages) for prefix in self._prefixes if prefix.running == 0)
            return needed <= self.cache.free_pages + idle and self.cache.evict_idle(needed)
        finally:
            for prefix in chain:
                prefix.running -= 1

    def next(self) -> Step | None:
        step = super().next()
        if step is not None:
            step.rows.sort(key=lambda request: request.rank)
        return step


class AtMost(GroupScheduler):
    """At most ``most`` requests run at a time, however much memory there is."""

    def __init__(self, gather_rows: int, most: int) -> None:
        super().__init__(gather_rows)
        self.most = most

    def _fits(self, request: Request, forecast: Forecast) -> bool:
        return len(self.running) < self.most and super()._fits(request, forecast)


class Promises:
    """Stands in for a Forecast: counts the pages of all growth to come as if it came at once."""

    def __init__(self, cache: PagedCache, expected: ExpectedLength, running: Iterable[Request]) -> None:
        self._cache = cache
        self._expected = expected
        self._promised = sum(map(self._growth, running))

    def has_room_to_the_end(self, request: Request, free: int) -> bool:
        return False  # ``admits`` decides

    def admits(self, request: Request, then: Request | None, free: int, delay: int = 0) -> bool:
        return self._cache.missing_with_ancestors(request, self._length(request)) + self._promised <= free

    def add(self, request: Request) -> None:
        self._promised += self._growth(request)

    def _length(self, request: Request) -> int:
        return max(len(request.prompt_ids) + self._expected.of(request) - 1, request.length)

    def _growth(self, request: Request) -> int:
        return self._cache.missing(request, self._length(request))


class StaticAdmission(GroupScheduler):
    """A newcomer must fit beside the expected final size of all running requests."""

    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        super().start(requests, cache, max_batch_tokens)
        self._expected = ExpectedLength()

    def finish(self, request: Request) -> None:
        if request.finish_reason is not FinishReason.TIME:
            self._expected.learn(len(request.generated))
        super().finish(request)

    def _forecast(self) -> Forecast:
        return Promises(self.cache, self._expected, self.running)  # type: ignore[return-value]
