"""Takes down how a call goes, while it goes: it costs a few microseconds a step, and as much memory after a million.

It asks nothing of the device. On a GPU, where the host is ahead, a step's time is when its tokens have come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..planning.paged_cache import PagedCache
from ..results.timeline import PHASES, Timeline

_MOST = 512  # stretches


class Stretch(NamedTuple):
    """Some steps that follow each other, up to ``end`` (seconds)."""

    end: float
    steps: int
    prompt_tokens: int
    decode_tokens: int
    running: int
    pages: int

    def then(self, other: Stretch) -> Stretch:
        return Stretch(
            other.end,
            self.steps + other.steps,
            self.prompt_tokens + other.prompt_tokens,
            self.decode_tokens + other.decode_tokens,
            max(self.running, other.running),
            max(self.pages, other.pages),
        )


class Timekeeper:
    """From when it is made on. ``ahead``: whether the model runs on a device while the host goes on."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, ahead: bool = False) -> None:
        self._clock = clock
        self._began = self._since = clock()
        self._phase = next(iter(PHASES))
        self._spent = dict.fromkeys(PHASES, 0.0)
        self.launching = "launching" if ahead else "model"  # the phase in which the model is called
        self._cache: PagedCache | None = None
        self._first: float | None = None  # when steps began
        self._stretches: list[Stretch] = []
        self._width = 0.0  # seconds that steps fit into to be in one stretch

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    # -- phases ------------------------------------------------------------------------------------------------

    def switch(self, phase: str) -> None:
        """From now on it is this phase, until the next one."""
        now = self._clock()
        # In this order: what an interrupt keeps from being counted here is found missing in the end.
        passed, self._since = now - self._since, now
        self._spent[self._phase] += passed
        self._phase = phase

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Something within another phase, which goes on afterwards."""
        before = self._phase
        self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def around(self, phase: str, call: Callable[..., None]) -> Callable[..., None]:
        def called(*args: Any) -> None:
            with self.during(phase):
                call(*args)

        return called

    # -- steps -------------------------------------------------------------------------------------------------

    def start(self, cache: PagedCache) -> None:
        """Steps begin."""
        self.switch("scheduling")
        self._cache = cache
        self._first = self.seconds

    def launched(self, steps: int, prompt_tokens: int, decode_tokens: int) -> Stretch:
        """To be handed to ``collected`` when it is over; what the cache holds now is what it holds meanwhile."""
        cache = self._cache
        assert cache is not None
        return Stretch(0.0, steps, prompt_tokens, decode_tokens, cache.requests, cache.num_pages - cache.free_pages)

    def collected(self, stretch: Stretch) -> None:
        stretches = self._stretches
        stretch = stretch._replace(end=self.seconds)
        if stretches and stretch.end - self._begin_of_last(stretches) <= self._width:
            stretches[-1] = stretches[-1].then(stretch)
            return
        stretches.append(stretch)
        if len(stretches) > _MOST:
            self._join()

    def _begin_of_last(self, stretches: Sequence[Stretch]) -> float:
        return stretches[-2].end if len(stretches) > 1 else self._first or 0.0

    def _join(self) -> None:
        """Neighbours that are short. Any two of those left are longer together than the new width: few are left."""
        self._width = 4 * (self._stretches[-1].end - (self._first or 0.0)) / _MOST
        joined: list[Stretch] = []
        for stretch in self._stretches:
            if joined and stretch.end - self._begin_of_last(joined) <= self._width:
                joined[-1] = joined[-1].then(stretch)
            else:
                joined.append(stretch)
        self._stretches = joined

    # -- afterwards --------------------------------------------------------------------------------------------

    def timeline(self, seconds: float, page_bytes: int, capture: float = 0.0) -> Timeline:
        """Of the first so many seconds. ``capture``: those within launching that captures of graphs took."""
        phases = dict(self._spent)
        phases[self.launching] -= capture
        phases["capture"] += capture
        phases[self._phase] = 0.0
        phases[self._phase] = max(0.0, seconds - sum(phases.values()))
        columns = list(zip(*self._stretches, strict=True)) or [()] * len(Stretch._fields)
        counts = (np.array(column, dtype=np.int64) for column in columns[1:])
        steps, prompt_tokens, decode_tokens, running, pages = counts
        return Timeline(
            begin=seconds if self._first is None else self._first,
            ends=np.array(columns[0], dtype=np.float64),
            steps=steps,
            prompt_tokens=prompt_tokens,
            decode_tokens=decode_tokens,
            running=running,
            cache_bytes=pages * page_bytes,
            phases=phases,
        )
