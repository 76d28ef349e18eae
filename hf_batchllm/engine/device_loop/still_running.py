"""Requests still running and the tokens each may still produce; decides which CUDA graphs to capture ahead."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.attention.kv_storage import KVStorage
from ...planning.requests_and_prefixes import Request


class StillRunning:
    """``most_rows``: the most rows that a step may have."""

    def __init__(self, requests: Sequence[Request], storage: KVStorage, most_rows: int) -> None:
        self._storage = storage
        self._most_rows = most_rows
        self._waiting = dict.fromkeys(requests)  # without a token so far
        self._begun: list[Request] = []
        self._pages = {request: request.most_pages(storage.page_size) for request in requests}
        self._most_pages = sum(self._pages.values())  # of the requests that have not ended

    def begin(self, sampling: Sequence[Request]) -> None:
        """A step gives these requests tokens, maybe their first."""
        for request in sampling:
            if request in self._waiting:
                del self._waiting[request]
                self._begun.append(request)

    @property
    def all_have_begun(self) -> bool:
        return not self._waiting

    def most_is_known(self) -> bool:
        """Whether all that have not ended fit at the same time. Otherwise it is not known how many will run."""
        # Plain fields in place of properties: there may be tens of thousands, in each step.
        going = [request for request in self._begun if request.finish_reason is None]
        if len(going) < len(self._begun):
            self._most_pages -= sum(self._pages[request] for request in self._begun if request.done)
            self._begun = going
        return self._most_pages <= self._storage.num_pages and len(going) + len(self._waiting) <= self._most_rows

    def tokens_left(self) -> tuple[list[int], bool]:
        """How many tokens each running request may still get, most first; and whether some may stop before that.

        Waiting requests count only if the most is known: then it is as things will be when the last has begun.
        """
        most_is_known, going = self.most_is_known(), self._begun
        left = [request.max_new_tokens - len(request.generated) - request.pending for request in going]
        if most_is_known:
            waiting = [request for request in self._waiting if request.finish_reason is None]
            tokens = sum(request.prompt_tokens - request.start for request in waiting)
            steps = tokens // self._most_rows  # in which their prompts are computed, one after the other
            left = [each - steps for each in left]
            left += [
                request.max_new_tokens - steps + steps * nth // len(waiting) for nth, request in enumerate(waiting)
            ]
            going = going + waiting
        left = sorted([each for each in left if each > 0], reverse=True)
        return left[: self._most_rows], any(request.can_stop for request in going)
