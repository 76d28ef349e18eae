"""Images are made ready by several threads, ahead of the chats that show them.

To load a picture and to resize it takes a tenth of a second, nearly all of it outside of Python's lock. Results are
taken in the order of the chats, so what comes of them does not depend on which thread was first.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_MOST_THREADS = 8
_AHEAD = 4  # images of each thread that are ready, or being made so, and have not been taken


def threads_here() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_THREADS, cores)


class ReadAhead(Generic[T]):
    """prepare: makes a source ready, in any thread. What it raises is raised where the result is taken."""

    def __init__(self, prepare: Callable[[Any], T], threads: int) -> None:
        self._prepare = prepare
        self._most = _AHEAD * threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hf_batchllm-images")
        self._waiting: deque[tuple[Hashable, Any]] = deque()
        self._expected: set[Hashable] = set()
        self._begun: dict[Hashable, Future[T]] = {}

    def expect(self, name: Hashable, source: Any) -> None:
        """It will be taken, if at all, after those that were expected before it."""
        if name not in self._expected:
            self._expected.add(name)
            self._waiting.append((name, source))

    def take(self, name: Hashable, source: Any) -> T:
        """Once for each name."""
        self._begin_some()
        found = self._begun.pop(name, None)
        return self._prepare(source) if found is None else found.result()

    def _begin_some(self) -> None:
        while self._waiting and len(self._begun) < self._most:
            name, source = self._waiting.popleft()
            self._begun[name] = self._pool.submit(self._prepare, source)

    def close(self) -> None:
        """What has not begun never does."""
        self._waiting.clear()
        self._begun.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
