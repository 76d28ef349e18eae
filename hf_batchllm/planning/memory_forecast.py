"""How much memory the running requests will need over the steps to come, and so whether one more request fits.

Each running request adds a token a step until it ends. Its length is known where nothing but its limit ends it;
otherwise it is estimated from the answers that have ended so far. Requests do not all end at once, so the most that
they need together at any one time is less than the sum of what each of them needs in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .paged_cache import PagedCache
from .requests_and_prefixes import FinishReason, Prefix, Request, Unit

_MOST_BUCKETS = 256  # of lengths, about
_PRIOR_ANSWERS = 4.0  # the guess made before any answer has ended weighs as much as so many answers
_MARGIN = 2.0  # standard deviations that are added to the mean
_TIMES_SPREAD = 48  # points in time at which memory is estimated: ever further apart,
_TIMES_AT_ENDS = 32  # and so many more, at which requests of known length end


class Lifetimes:
    """How long answers become: learned from those that have ended, and from the lengths of those that still run.

    ``longest``: the longest that any answer may become.
    """

    def __init__(self, longest: int) -> None:
        self._width = -(-longest // _MOST_BUCKETS)
        self._stopped = np.zeros(longest // self._width + 1)
        # Before any answer has ended, lengths about 20 are as likely as lengths about 200.
        even = 1 / np.arange(1, len(self._stopped) + 1)
        self._prior = _PRIOR_ANSWERS * even / even.sum()
        self._cut = np.zeros_like(self._stopped)  # ended by a limit: their own end would have come later

    def learn(self, request: Request) -> None:
        if request.can_stop:
            ends = self._stopped if request.finish_reason is FinishReason.STOP else self._cut
            ends[len(request.generated) // self._width] += 1

    def survival(self, made: np.ndarray) -> _Survival:
        """``made`` [running] int64: the new tokens of each running request."""
        size = len(self._stopped)
        unended = self._cut + np.bincount(made // self._width, minlength=size)
        stopped = self._stopped + self._prior
        at_risk = np.cumsum((stopped + unended)[::-1])[::-1]
        # An unended answer in a bucket has passed half of it, on average.
        passed = 1 - stopped / (at_risk - unended / 2)
        return _Survival(np.concatenate([[1.0], np.cumprod(np.maximum(passed, 1e-9))]), self._width)


class _Survival:
    """``share`` [buckets + 1]: the share of all answers that become longer than so many buckets of ``width`` tokens."""

    def __init__(self, share: np.ndarray, width: int) -> None:
        at = np.arange(len(share)) * width
        self._share: np.ndarray = np.interp(np.arange(at[-1] + 1), at, share)  # of tokens: a look-up is much faster

    def longer(self, than: np.ndarray) -> np.ndarray:
        """The share of all answers that become longer than ``than`` tokens."""
        share: np.ndarray = self._share.take(than, mode="clip")
        return share


class Forecast:
    """``running``: the requests that run, as they are when memory is short. Those that enter are told of by ``add``.

    ``most_new_pages``: the pages to add if all that run now came to their longest at once: an upper bound.
    Requests on the same prefix are expected to enter one after the other. So the request after a newcomer tells whether
    the newcomer's prefixes stay when it ends.
    """

    def __init__(
        self,
        cache: PagedCache,
        lifetimes: Lifetimes,
        running: Iterable[Request],
        longest: int,
        most_new_pages: int,
    ) -> None:
        self._cache = cache
        self._lifetimes = lifetimes
        self._longest = longest
        self._running = running
        self.most_new_pages = most_new_pages
        self._curves: _Curves | None = None  # made on first need

    def has_room_to_the_end(self, request: Request, free: int) -> bool:
        """Whether ``free`` pages are enough for ``request`` and all others at their longest."""
        return self._cache.missing_with_ancestors(request, request.max_length) + self.most_new_pages <= free

    def admits(self, request: Request, then: Request | None, free: int, delay: int = 0) -> bool:
        """Whether ``request`` fits into ``free`` pages, now and later. ``then``: the next request in the queue.

        ``delay``: the most steps that may pass after this one before the prompt of ``request`` is computed.
        """
        if self.has_room_to_the_end(request, free):
            return True
        if self._cache.missing_with_ancestors(request, request.length) > free:
            return False
        if self._curves is None:
            running = _RequestArrays([*self._running], self._cache.page_size)
            self._curves = _Curves(self._cache, self._lifetimes, running, self._longest)
        return self._curves.peak_with(request, then, delay) <= free

    def add(self, request: Request) -> None:
        """``request`` has entered, and has pages for its prompt."""
        self.most_new_pages += self._cache.missing(request, request.max_length)
        if self._curves is not None:
            self._curves.add(request)


class _RequestArrays:
    """The numbers of ``requests`` as arrays, one entry for each request: there may be thousands."""

    def __init__(self, requests: Sequence[Request], page_size: int) -> None:
        self.requests = requests
        self._page_size = page_size
        self.made = np.array([len(request.generated) + request.pending for request in requests], dtype=np.int64)
        limits = np.array([request.max_new_tokens for request in requests], dtype=np.int64)
        prompts = np.array([request.prompt_tokens for request in requests], dtype=np.int64)
        self._own_prompt = prompts - np.array([request.start for request in requests], dtype=np.int64)
        self.left = limits - self.made
        self.can_stop = np.array([request.can_stop for request in requests], dtype=bool)
        self.pages = sum(len(request.pages) for request in requests)  # that all of them have now

    def over(self, times: np.ndarray, survival: _Survival, delay: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """[requests, times] each: how likely it is that a request still runs, and its pages then.

        From one point in time to the next a request counts as if it ran as surely as at the first and had the pages of
        the second. A request that may start late, by ``delay`` steps, is counted as growing on time and as ending late:
        both estimates are safe.
        """
        before = np.maximum(np.concatenate([[0], times[:-1]]) - delay, 0)
        alive = (self.left[:, None] > before).astype(float)
        if self.can_stop.any():
            likely = survival.longer(self.made[:, None] + before) / survival.longer(self.made)[:, None]
            alive *= likely if self.can_stop.all() else np.where(self.can_stop[:, None], likely, 1.0)
        tokens = (self._own_prompt + self.made)[:, None] + np.minimum(times, self.left[:, None]) - 1
        return alive, (-(-tokens // self._page_size)).astype(float)


class _Curves:
    """Over the time to come, the pages of the running requests and of the prefixes that leave with them."""

    def __init__(self, cache: PagedCache, lifetimes: Lifetimes, running: _RequestArrays, longest: int) -> None:
        self._cache = cache
        known = running.left[~running.can_stop]
        when = [np.geomspace(1, longest, _TIMES_SPREAD)]
        if len(known):
            when.append(np.quantile(known, np.linspace(0, 1, _TIMES_AT_ENDS), method="lower"))
        self._times = np.unique(np.concatenate(when).astype(np.int64))  # [times]  steps from now
        self._survival = lifetimes.survival(running.made)
        alive, pages = running.over(self._times, self._survival)
        likely = alive * pages
        self._mean = likely.sum(0)  # [times]  pages of the running requests
        self._variance = (likely * (pages - likely)).sum(0)  # [times]
        self._pages_now = running.pages
        self._unread = _unread_probabilities(
            running.requests, alive
        )  # of each prefix [times]: how likely it has no reader left
        self._leaving = np.zeros_like(self._mean)  # [times]  pages of such prefixes
        for prefix, unread in self._unread.items():
            self._leaving += self._pages_leaving(prefix) * unread

    @staticmethod
    def _pages_leaving(prefix: Unit) -> int:
        """Pages that ``prefix`` gives back when its last reader has ended."""
        return 0 if isinstance(prefix, Prefix) and prefix.kept else len(prefix.pages)

    def peak_with(self, request: Request, then: Request | None, delay: int) -> float:
        """The most pages, beyond those in use now, that are needed at any time if ``request`` enters."""
        (alive,), (pages,) = self._alive_and_pages(request, delay)
        mean = self._mean + alive * pages - self._leaving
        variance = self._variance + alive * (1 - alive) * pages**2
        stay = {prefix for prefix, _ in then.ancestors()} if then is not None else set()
        mine = {prefix for prefix, _ in request.ancestors()}
        for prefix in stay | mine:
            if (unread := self._unread.get(prefix)) is not None:
                mean += self._pages_leaving(prefix) * unread * (1.0 if prefix in stay else alive)
        brought = sum(self._cache.missing(prefix, end) for prefix, end in request.ancestors())
        return float((mean + _MARGIN * np.sqrt(variance)).max()) - self._pages_now + brought

    def add(self, request: Request) -> None:
        """Count ``request`` too, without a delay: only the last to enter a step may have one, and none follows."""
        (alive,), (pages,) = self._alive_and_pages(request)
        self._mean += alive * pages
        self._variance += alive * (1 - alive) * pages**2
        self._pages_now += len(request.pages)
        for prefix, _ in request.ancestors():
            before = self._unread.get(prefix)
            self._unread[prefix] = unread = 1 - alive if before is None else before * (1 - alive)
            self._leaving += self._pages_leaving(prefix) * (unread if before is None else unread - before)

    def _alive_and_pages(self, request: Request, delay: int = 0) -> tuple[np.ndarray, np.ndarray]:
        return _RequestArrays([request], self._cache.page_size).over(self._times, self._survival, delay)


def _unread_probabilities(requests: Sequence[Request], alive: np.ndarray) -> dict[Unit, np.ndarray]:
    """For each prefix below ``requests`` [times]: how likely it is that none of its readers runs any more.

    ``alive`` [requests, times]: how likely it is that a request runs.
    """
    members: dict[Unit, list[int]] = {}
    for row, request in enumerate(requests):
        if request.base is not None:
            members.setdefault(request.base, []).append(row)
    if not members:
        return {}
    rows = np.concatenate([np.array(some) for some in members.values()])
    begins = np.cumsum([0, *(len(some) for some in members.values())])[:-1]
    unread: dict[Unit, np.ndarray] = {}
    for base, ended in zip(members, np.multiply.reduceat(1 - alive[rows], begins, axis=0), strict=True):
        unit: Unit | None = base
        while unit is not None:
            unread[unit] = ended if unit not in unread else unread[unit] * ended
            unit = unit.base
    return unread
