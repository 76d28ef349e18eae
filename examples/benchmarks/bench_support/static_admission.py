"""Static admission, as it once was: a newcomer must fit beside the expected final size of all running requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hf_batchllm.planning.expected_length import ExpectedLength
from hf_batchllm.planning.memory_forecast import Forecast
from hf_batchllm.planning.paged_cache import PagedCache
from hf_batchllm.planning.requests_and_prefixes import FinishReason, Request
from hf_batchllm.planning.scheduler import GroupScheduler


class Promises:
    """In a Forecast's place: counts the pages of all growth to come as if it came at once."""

    def __init__(self, cache: PagedCache, expected: ExpectedLength, running: Iterable[Request]) -> None:
        self._cache = cache
        self._expected = expected
        self._promised = sum(map(self._growth, running))

    def admits(self, request: Request, then: Request | None, free: int, delay: int = 0) -> bool:
        return self._cache.missing_with_ancestors(request, self._length(request)) + self._promised <= free

    def add(self, request: Request) -> None:
        self._promised += self._growth(request)

    def _length(self, request: Request) -> int:
        return max(len(request.prompt_ids) + self._expected.of(request) - 1, request.length)

    def _growth(self, request: Request) -> int:
        return self._cache.missing(request, self._length(request))


class StaticAdmission(GroupScheduler):
    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        super().start(requests, cache, max_batch_tokens)
        self._expected = ExpectedLength()

    def finish(self, request: Request) -> None:
        if request.finish_reason is not FinishReason.TIME:
            self._expected.learn(len(request.generated))
        super().finish(request)

    def _forecast(self) -> Forecast:
        return Promises(self.cache, self._expected, self.running)  # type: ignore[return-value]
