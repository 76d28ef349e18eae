"""Who has yet to end, and how long they may go on: what graphs are prepared by."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.kv_storage import KVStorage
from ...planning.units import Request


class StillRunning:
    """``most_rows``: of a step."""

    def __init__(self, requests: Sequence[Request], storage: KVStorage, most_rows: int) -> None:
        self._storage = storage
        self._most_rows = most_rows
        self._waiting = dict.fromkeys(requests)  # for their first token
        self._begun: list[Request] = []
        self._pages = {request: request.most_pages(storage.page_size) for request in requests}
        self._most_pages = sum(self._pages.values())  # of those that have not ended

    def begin(self, sampling: Sequence[Request]) -> None:
        """They get tokens, maybe their first."""
        for request in sampling:
            if request in self._waiting:
                del self._waiting[request]
                self._begun.append(request)

    def left(self) -> tuple[list[int], bool]:
        """How many tokens each of those that run at a time may still get, most first; whether some may stop before.

        Whoever waits is not looked at, unless all are to run.
        """
        going = [request for request in self._begun if not request.done]
        if len(going) < len(self._begun):
            self._most_pages -= sum(self._pages[request] for request in self._begun if request.done)
            self._begun = going
        # Where not all can run at a time, it is not known how many will.
        if self._most_pages <= self._storage.num_pages and len(going) + len(self._waiting) <= self._most_rows:
            going = [*going, *(request for request in self._waiting if not request.done)]
        left = [request.max_new_tokens - request.made for request in going]
        left = sorted((each for each in left if each > 0), reverse=True)
        return left[: self._most_rows], any(request.can_stop for request in going)
