"""How much memory the requests that run will need, over the steps to come: whether there is room for one more.

Each of them adds a token a step for as long as it goes on. Where its length is known, that is certain; else it is as
likely as answers have turned out to be so far. They do not all end at once, so what they need together at any one time
is less than what each of them needs in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .paged_cache import PagedCache
from .units import FinishReason, Request, Unit

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
        at = np.arange(len(share)) * width
        self._share = np.interp(np.arange(at[-1] + 1), at, share)  # looking up is much faster

    def longer(self, than: np.ndarray) -> np.ndarray:
        return self._share.take(than, mode="clip")


class Forecast:
    """``running``: those that run now. Whoever is let in is to be told by ``add``.

    Members of a prefix are expected to come one after the other: who comes next tells whether it stays for others.
    """

    def __init__(self, cache: PagedCache, lifetimes: Lifetimes, running: Iterable[Request], longest: int) -> None:
        self._cache = cache
        self._lifetimes = lifetimes
        self._longest = longest
        self._running = _Rows([*running], cache.page_size)
        # To add if all of them were at their longest at once, so never more.
        self.most = self._running.most
        self._entered: list[Request] = []  # since then, as long as there are no curves
        self._curves: _Curves | None = None  # made when they are needed

    def admits(self, request: Request, then: Request | None, free: int, late: int = 0) -> bool:
        """Whether ``request`` may enter where so many pages are free. ``then``: who comes after it, and waits.

        ``late``: steps after this one before its prompt is computed, at the most.
        """
        if self._cache.missing_with_ancestors(request, request.max_length) + self.most <= free:
            return True
        if self._cache.missing_with_ancestors(request, request.length) > free:
            return False
        if self._curves is None:
            running = self._running
            if self._entered:
                running = _Rows([*running.requests, *self._entered], self._cache.page_size)
            self._curves = _Curves(self._cache, self._lifetimes, running, self._longest)
        return self._curves.peak_with(request, then, late) <= free

    def add(self, request: Request) -> None:
        """It has entered, and has pages."""
        self.most += self._cache.missing(request, request.max_length)
        if self._curves is None:
            self._entered.append(request)
        else:
            self._curves.add(request)


class _Rows:
    """What arithmetic needs to know of ``requests``; there may be thousands."""

    def __init__(self, requests: Sequence[Request], page_size: int) -> None:
        self.requests = requests
        self._page_size = page_size
        seen = [len(request.generated) for request in requests]
        pending = [request.pending for request in requests]
        self.made = np.array(seen, dtype=np.int64) + np.array(pending, dtype=np.int64)
        limits = np.array([request.max_new_tokens for request in requests], dtype=np.int64)
        prompts = np.array([len(request.prompt_ids) for request in requests], dtype=np.int64)
        self._own_prompt = prompts - np.array([request.start for request in requests], dtype=np.int64)
        self.left = limits - self.made
        self.can_stop = np.array([request.can_stop for request in requests], dtype=bool)
        held = np.array([len(request.pages) for request in requests], dtype=np.int64)
        self.held = int(held.sum())
        in_the_end = -(-(self._own_prompt + limits - 1) // page_size)
        self.most = int(np.maximum(in_the_end - held, 0).sum())  # pages to add

    def over(self, times: np.ndarray, going_on: _GoingOn, late: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """[requests, times] each: how likely it is that one still runs, and its pages then.

        From one point in time to the next it counts as who runs at the first with the pages of the second. Who may be
        ``late`` counts as who is not as long as it grows, and as who is when it comes to ending.
        """
        before = np.maximum(np.concatenate([[0], times[:-1]]) - late, 0)
        alive = (self.left[:, None] > before).astype(float)
        if self.can_stop.any():
            likely = going_on.longer(self.made[:, None] + before) / going_on.longer(self.made)[:, None]
            alive *= likely if self.can_stop.all() else np.where(self.can_stop[:, None], likely, 1.0)
        tokens = (self._own_prompt + self.made)[:, None] + np.minimum(times, self.left[:, None]) - 1
        return alive, (-(-tokens // self._page_size)).astype(float)


class _Curves:
    """Pages over time, of what runs and of what it stands on."""

    def __init__(self, cache: PagedCache, lifetimes: Lifetimes, running: _Rows, longest: int) -> None:
        self._cache = cache
        known = running.left[~running.can_stop]
        when = [np.geomspace(1, longest, _LIKELY)]
        if len(known):
            when.append(np.quantile(known, np.linspace(0, 1, _CERTAIN), method="lower"))
        self._times = np.unique(np.concatenate(when).astype(np.int64))  # [times]  steps from now
        self._going_on = lifetimes.going_on(running.made)
        alive, pages = running.over(self._times, self._going_on)
        likely = alive * pages
        self._mean = likely.sum(0)  # [times]
        self._variance = (likely * (pages - likely)).sum(0)
        self._held = running.held
        # Of each prefix: how likely it is that nobody who runs stands on it any more; and the pages that go with all.
        self._left_alone = _left_alone(running.requests, alive)
        self._leaving = np.zeros_like(self._mean)
        for prefix, ended in self._left_alone.items():
            self._leaving += self._pages_of(prefix) * ended

    @staticmethod
    def _pages_of(prefix: Unit) -> int:
        return 0 if prefix.kept else len(prefix.pages)  # type: ignore[attr-defined]

    def peak_with(self, request: Request, then: Request | None, late: int) -> float:
        """The most pages beyond those of now that are needed at any time, with ``request``."""
        (alive,), (pages,) = _Rows([request], self._cache.page_size).over(self._times, self._going_on, late)
        mean = self._mean + alive * pages - self._leaving
        variance = self._variance + alive * (1 - alive) * pages**2
        stay = {prefix for prefix, _ in then.ancestors()} if then is not None else set()
        mine = {prefix for prefix, _ in request.ancestors()}
        for prefix in stay | mine:
            if (ended := self._left_alone.get(prefix)) is not None:
                mean += self._pages_of(prefix) * ended * (1.0 if prefix in stay else alive)
        brought = sum(self._cache.missing(prefix, cut) for prefix, cut in request.ancestors())
        return float((mean + _CAREFUL * np.sqrt(variance)).max()) - self._held + brought

    def add(self, request: Request) -> None:
        """Only the last to enter a step may have to wait for its prompt, and nobody is asked for after it."""
        (alive,), (pages,) = _Rows([request], self._cache.page_size).over(self._times, self._going_on)
        self._mean += alive * pages
        self._variance += alive * (1 - alive) * pages**2
        self._held += len(request.pages)
        for prefix, _ in request.ancestors():
            was = self._left_alone.get(prefix)
            self._left_alone[prefix] = ended = 1 - alive if was is None else was * (1 - alive)
            self._leaving += self._pages_of(prefix) * (ended if was is None else ended - was)


def _left_alone(requests: Sequence[Request], alive: np.ndarray) -> dict[Unit, np.ndarray]:
    """Of each prefix below ``requests``, how likely it is that none of them runs any more.

    ``alive`` [requests, times]: how likely each of them does.
    """
    members: dict[Unit, list[int]] = {}
    for row, request in enumerate(requests):
        if request.base is not None:
            members.setdefault(request.base, []).append(row)
    if not members:
        return {}
    rows = np.concatenate([np.array(some) for some in members.values()])
    begins = np.cumsum([0, *(len(some) for some in members.values())])[:-1]
    found: dict[Unit, np.ndarray] = {}
    for above, ended in zip(members, np.multiply.reduceat(1 - alive[rows], begins, axis=0), strict=True):
        unit: Unit | None = above
        while unit is not None:
            found[unit] = ended if unit not in found else found[unit] * ended
            unit = unit.base
    return found
