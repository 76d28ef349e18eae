"""How much memory the requests that run will need, over the steps to come: whether there is room for one more.

Each of them adds a token a step for as long as it goes on. Where its length is known, that is certain; else it is as
likely as answers have turned out to be so far. They do not all end at once, so what they need together at any one time
is less than what each of them needs in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .cache import PagedCache
from .request import FinishReason, Request, Unit

_BUCKETS = 256
_UNSEEN = 4.0  # what is thought of lengths beforehand counts as much as so many answers
_CAREFUL = 2.0  # standard deviations of what they need together
_LIKELY, _CERTAIN = 48, 32  # points in time: ever further apart, and when some of those end whose length is known


class Lifetimes:
    """How long answers become, learned from those that have ended and from how far the others have come.

    ``longest``: as long as any may become.
    """

    def __init__(self, longest: int) -> None:
        self._width = -(-longest // _BUCKETS)
        self._stopped = np.zeros(longest // self._width + 1)
        # Before any have been seen they are as likely to be of about 20 tokens as of about 200.
        even = 1 / np.arange(1, len(self._stopped) + 1)
        self._unseen = _UNSEEN * even / even.sum()
        self._cut = np.zeros_like(self._stopped)  # by a limit: nobody knows how long they would have become

    def learn(self, request: Request) -> None:
        if request.can_stop:
            ends = self._stopped if request.finish_reason is FinishReason.STOP else self._cut
            ends[len(request.generated) // self._width] += 1

    def going_on(self, made: np.ndarray) -> _GoingOn:
        """``made`` [running] int64: new tokens of those that have not ended."""
        size = len(self._stopped)
        unended = self._cut + np.bincount(made // self._width, minlength=size)
        stopped = self._stopped + self._unseen
        at_risk = np.cumsum((stopped + unended)[::-1])[::-1]
        # Whoever has come into a bucket is half through it, on average.
        kept = 1 - stopped / (at_risk - unended / 2)
        return _GoingOn(np.concatenate([[1.0], np.cumprod(np.maximum(kept, 1e-9))]), self._width)


class _GoingOn:
    """``share`` [buckets + 1]: of all answers, those that become longer than so many buckets."""

    def __init__(self, share: np.ndarray, width: int) -> None:
        self._share = share
        self._at = np.arange(len(share)) * float(width)

    def longer(self, than: np.ndarray) -> np.ndarray:
        return np.interp(than, self._at, self._share)


class Forecast:
    """``running``: those that run now. Whoever is let in is to be told by ``add``.

    Members of a prefix are expected to come one after the other: who comes next tells whether it stays for others.
    """

    def __init__(self, cache: PagedCache, lifetimes: Lifetimes, running: Iterable[Request], longest: int) -> None:
        self._cache = cache
        self._lifetimes = lifetimes
        self._longest = longest
        self._running = [*running]
        # To add if all of them were at their longest at once, so never more.
        self.most = sum(cache.missing(request, request.max_length) for request in self._running)
        self._curves: _Curves | None = None  # made when they are needed

    def admits(self, request: Request, then: Request | None, free: int) -> bool:
        """Whether ``request`` may enter where so many pages are free. ``then``: who comes after it, and waits."""
        if self._cache.missing_with_ancestors(request, request.max_length) + self.most <= free:
            return True
        if self._cache.missing_with_ancestors(request, request.length) > free:
            return False
        if self._curves is None:
            self._curves = _Curves(self._cache, self._lifetimes, self._running, self._longest)
        return self._curves.peak_with(request, then) <= free

    def add(self, request: Request) -> None:
        """It has entered, and has pages."""
        self._running.append(request)
        self.most += self._cache.missing(request, request.max_length)
        if self._curves is not None:
            self._curves.add(request)


class _Curves:
    """Pages over time, of what runs and of what it stands on."""

    def __init__(self, cache: PagedCache, lifetimes: Lifetimes, running: Sequence[Request], longest: int) -> None:
        self._cache = cache
        made = np.array([request.made for request in running], dtype=np.int64)
        left = np.array([request.max_new_tokens for request in running]) - made
        known = left[[not request.can_stop for request in running]]
        when = [np.geomspace(1, longest, _LIKELY)]
        if len(known):
            when.append(np.quantile(known, np.linspace(0, 1, _CERTAIN), method="lower"))
        self._times = np.unique(np.concatenate(when).astype(np.int64))  # [times]  steps from now
        self._before = np.concatenate([[0], self._times[:-1]])
        self._going_on = lifetimes.going_on(made)
        alive, pages = self._of(running, made, left)
        self._mean = (alive * pages).sum(0)  # [times]
        self._variance = (alive * (1 - alive) * pages**2).sum(0)
        self._held = sum(len(request.pages) for request in running)
        # Of each prefix: how likely it is that nobody who runs stands on it any more.
        self._left_alone: dict[Unit, np.ndarray] = {}
        ended = np.ones_like(self._mean)
        for request, going_on in zip(running, alive, strict=True):
            for prefix, _ in request.ancestors():
                self._left_alone[prefix] = self._left_alone.get(prefix, ended) * (1 - going_on)

    def _of(self, requests: Sequence[Request], made: np.ndarray, left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[requests, times] each: how likely it is that one still runs, and its pages then.

        From one point in time to the next it counts as who runs at the first with the pages of the second.
        """
        own = np.array([request.length - request.start for request in requests], dtype=np.int64)
        can_stop = np.array([request.can_stop for request in requests], dtype=bool)
        alive = (left[:, None] > self._before).astype(float)
        if can_stop.any():
            likely = self._going_on.longer(made[:, None] + self._before) / self._going_on.longer(made)[:, None]
            alive *= np.where(can_stop[:, None], likely, 1.0)
        tokens = own[:, None] + np.minimum(self._times, left[:, None]) - 1
        return alive, -(-tokens // self._cache.page_size)

    def _one(self, request: Request) -> tuple[np.ndarray, np.ndarray]:
        made = np.array([request.made], dtype=np.int64)
        alive, pages = self._of([request], made, request.max_new_tokens - made)
        return alive[0], pages[0]

    def peak_with(self, request: Request, then: Request | None) -> float:
        """The most pages beyond those of now that are needed at any time, with ``request``."""
        alive, pages = self._one(request)
        mean = self._mean + alive * pages
        variance = self._variance + alive * (1 - alive) * pages**2
        stay = {prefix for prefix, _ in then.ancestors()} if then is not None else set()
        mine = {prefix for prefix, _ in request.ancestors()}
        for prefix, likely in self._left_alone.items():
            if prefix not in stay and not prefix.kept:  # type: ignore[attr-defined]
                mean -= likely * (1 - alive if prefix in mine else 1.0) * len(prefix.pages)
        brought = sum(self._cache.missing(prefix, cut) for prefix, cut in request.ancestors())
        return float((mean + _CAREFUL * np.sqrt(variance)).max()) - self._held + brought

    def add(self, request: Request) -> None:
        alive, pages = self._one(request)
        self._mean += alive * pages
        self._variance += alive * (1 - alive) * pages**2
        self._held += len(request.pages)
        for prefix, _ in request.ancestors():
            self._left_alone[prefix] = self._left_alone.get(prefix, np.ones_like(alive)) * (1 - alive)
