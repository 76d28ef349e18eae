"""Records how a call goes over its time: phases, and stretches of steps.

A step costs a few microseconds, and a million steps take as much memory as a few hundred. The device is asked for
nothing: on a GPU, a step's time is the moment at which its tokens arrived at the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..planning.paged_cache import PagedCache
from ..results.timeline import PHASES, Timeline

_MOST_STRETCHES = 512


class Stretch(NamedTuple):
    """Consecutive steps, up to ``end`` (seconds)."""

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
    """Starts when it is made. ``ahead``: whether the model runs on a device while the host goes on."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, ahead: bool = False) -> None:
        self._clock = clock
        self._began = self._since = clock()
        self._phase = next(iter(PHASES))
        self._spent = dict.fromkeys(PHASES, 0.0)
        self.launching = "launching" if ahead else "model"  # the phase of calling the model
        self._cache: PagedCache | None = None
        self._first: float | None = None  # when steps began
        self._stretches: list[Stretch] = []
        self._width = 0.0  # seconds: consecutive steps that fit into it are one stretch

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    # -- phases ------------------------------------------------------------------------------------------------

    def switch(self, phase: str) -> None:
        """Begin a phase, which ends the one before."""
        now = self._clock()
        self._spent[self._phase] += now - self._since
        self._phase, self._since = phase, now

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase within another one, which goes on afterwards."""
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
        """A stretch of one launch, for ``collected``. The cache holds as much during the step as it does now."""
        cache = self._cache
        assert cache is not None
        return Stretch(0.0, steps, prompt_tokens, decode_tokens, cache.requests, cache.num_pages - cache.free_pages)

    def collected(self, stretch: Stretch) -> None:
        self._add(self._stretches, stretch._replace(end=self.seconds))
        if len(self._stretches) > _MOST_STRETCHES:
            # Any two neighbours that remain are longer together than the new width, so few remain.
            self._width = 4 * (self._stretches[-1].end - (self._first or 0.0)) / _MOST_STRETCHES
            joined: list[Stretch] = []
            for each in self._stretches:
                self._add(joined, each)
            self._stretches = joined

    def _add(self, stretches: list[Stretch], stretch: Stretch) -> None:
        """Joins it with the one before, if the two are short together."""
        begin = stretches[-2].end if len(stretches) > 1 else self._first or 0.0
        if stretches and stretch.end - begin <= self._width:
            stretches[-1] = stretches[-1].then(stretch)
        else:
            stretches.append(stretch)

    # -- afterwards --------------------------------------------------------------------------------------------

    def timeline(self, seconds: float, page_bytes: int, capture: float = 0.0) -> Timeline:
        """The first ``seconds`` of the call. ``capture``: seconds of launching that went into capturing graphs."""
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
