"""What goes into the next step.

The default scheduler fills memory and keeps sharers together; a plain one shows the seam.

A scheduler plans; it neither knows what a token is nor waits for one. It counts only what is new: the tokens that a
step must run, the pages that a request adds.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from .base_scheduler import BaseScheduler, as_base_scheduler
from .memory_forecast import Forecast, Lifetimes
from .paged_cache import PagedCache
from .units import Chunk, FinishReason, Request, Step


def make_scheduler(choice: Any, gather_rows: int = 0) -> BaseScheduler:
    """``gather_rows`` as GroupScheduler has it, where the choice is "groups"."""
    if choice == "groups":
        return GroupScheduler(gather_rows)
    return FifoScheduler() if isinstance(choice, str) else as_base_scheduler(choice)


_AT_FIRST = 4  # times that rows run in a row when answers that may stop begin
_SOONER = 4  # where newcomers wait for whoever stops, rows run so many times fewer before somebody looks


class ExpectedLength:
    """How long answers become, learned from those that have ended."""

    _SURE = 8  # answers seen before their spread is trusted

    def __init__(self) -> None:
        self.count, self._mean, self._squares = 0, 0.0, 0.0

    def learn(self, new_tokens: int) -> None:
        self.count += 1
        delta = new_tokens - self._mean
        self._mean += delta / self.count
        self._squares += delta * (new_tokens - self._mean)

    def of(self, request: Request) -> int:
        """New tokens to expect of a request that has not ended, those that it has already among them."""
        if not request.can_stop:
            return request.max_new_tokens
        if self.count < self._SURE:
            guess = request.max_new_tokens / 2  # nothing is known: neither all stop at once nor all run to the limit
        else:
            # The first to end are the short ones, so the mean alone would be too low.
            guess = self._mean + math.sqrt(self._squares / self.count)
        return min(request.max_new_tokens, max(math.ceil(guess), request.made + 1))


class QueueScheduler(BaseScheduler):
    """What the schedulers here have in common: they keep queues, cut prompts into chunks and give pages back."""

    runs_ahead = True
    ends_waiting = True

    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.waiting = deque(self._ordered(requests))
        self.running: dict[Request, None] = {}  # oldest first; a dict, so that one can leave from the middle
        self.preemptions = 0
        self._some_gave_up = False

    @abstractmethod
    def _ordered(self, requests: Sequence[Request]) -> Iterable[Request]:
        """The order in which requests are let in."""

    def finish(self, request: Request) -> None:
        if request in self.running:
            self._leave(request)
        else:
            self._some_gave_up = True  # many do so at once: they are taken out of the queue together
        self.cache.retire(request)

    def _empty_step(self) -> Step:
        if self._some_gave_up:
            self.waiting = deque(request for request in self.waiting if not request.done)
            self._some_gave_up = False
        return Step()

    def repeat(self, step: Step, most: int) -> int:
        """How many times the rows of ``step``, which has no chunks, are to run; the pages for it are reserved."""
        rows = step.rows
        if len(rows) < sum(not request.exhausted for request in self.running):
            return 1  # others wait for their turn
        left = [request.max_new_tokens - request.made for request in rows]
        times = min(most, max(left))
        if any(request.can_stop for request in rows):
            # Two bursts are on their way when somebody stops, so what runs in vain is about what was made, at most.
            times = min(times, max(_AT_FIRST, max(request.made for request in rows) // 2))
        if self.waiting:  # for memory: whoever ends makes room
            times = min(times, *left)
            if any(request.can_stop for request in rows):
                times = min(times, max(1, most // _SOONER))

        def ends(times: int) -> list[int]:
            # The step itself has been counted as computed; the last token is sampled and not run.
            return [request.length + min(times, own) - 1 for request, own in zip(rows, left, strict=True)]

        def too_many(times: int) -> bool:
            pairs = zip(rows, ends(times), strict=True)
            return sum(self.cache.missing(request, end) for request, end in pairs) > self.cache.free_pages

        if too_many(times):
            times = bisect_left(range(times), True, lo=2, key=too_many) - 1
        for request, end in zip(rows, ends(times), strict=True):
            self.cache.reserve(request, end)
            request.computed = end
        return times

    def _enter(self, request: Request) -> None:
        """Into the running set, with pages for its whole prompt and for whatever of its prefixes is not there."""
        for prefix, cut in request.ancestors():
            self.cache.reserve(prefix, cut)
            prefix.running += 1
        self.cache.reserve(request, request.length)
        self.running[request] = None

    def _make_room_alone(self, request: Request, upto: int, beside: int = 0) -> bool:
        """Room for a newcomer, and so many pages beside, while nothing runs, whatever has to go for it."""
        # Held while room is made, or what the request stands on would go first and be computed again.
        chain = [prefix for prefix, _ in request.ancestors()]
        for prefix in chain:
            prefix.running += 1
        try:
            if self.cache.evict_idle(self.cache.missing_with_ancestors(request, upto) + beside):
                return True
        finally:
            for prefix in chain:
                prefix.running -= 1
        # A prefix kept from another call may hold more than is read of it: then everything goes, and comes back cut.
        return self.cache.evict_idle(self.cache.num_pages)

    def _could_have(self, pages: int) -> bool:
        """Whether so many pages may be had without taking any from the call's own requests."""
        return pages <= self.cache.free_pages + self.cache.evictable_pages

    def _leave(self, request: Request) -> None:
        del self.running[request]
        for prefix, _ in request.ancestors():
            prefix.running -= 1

    def _fill(self, request: Request, step: Step, budget: int) -> int:
        """Put what is left of the request's prompt into the step, outermost prefix first. Returns the tokens used."""
        used = 0
        parts = [*request.ancestors(), (request, request.length)]
        for unit, end in parts:
            count = min(end - unit.computed, budget - used)
            if count > 0:
                step.chunks.append(Chunk(unit, unit.computed, unit.computed + count))
                unit.computed += count
                used += count
            if unit.computed < end:
                break
        return used

    def _row(self, request: Request, step: Step) -> None:
        step.rows.append(request)
        request.computed += 1

    def _checked(self, step: Step) -> Step | None:
        unseen = any(request.pending for request in self.running)  # then more may be known soon
        if step.tokens == 0 and (self.running or self.waiting) and not unseen:
            raise RuntimeError(
                f"the scheduler is stuck: {len(self.running)} requests running, {len(self.waiting)} waiting, "
                f"{self.cache.free_pages} of {self.cache.num_pages} pages free"
            )
        return step if step.tokens else None


class GroupScheduler(QueueScheduler):
    """Decode rows first, then prompts as far as the token budget goes, then newcomers as far as memory goes.

    Newcomers are let in by memory alone: a request enters when the pages that it adds fit beside those running, at any
    time as they are expected to grow and to end. When the expectation was too low the youngest gives its pages back
    and is computed again later; the oldest never does, so something always moves.

    Fewer than ``gather_rows`` decode rows wait while prompts fill the step, until there are so many or no prompts
    left. Where a few rows cost nearly as much as many and prompts hide none of it (a CPU), that makes fewer steps.
    """

    def __init__(self, gather_rows: int = 0) -> None:
        self.gather_rows = gather_rows

    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        super().start(requests, cache, max_batch_tokens)
        self._longest = max((request.max_new_tokens for request in requests), default=1)
        self._lifetimes = Lifetimes(self._longest)
        self._full = False  # somebody was kept out, and nobody has ended since: it would hardly be otherwise now
        self._budget_left = max_batch_tokens  # of the step in the making

    def _ordered(self, requests: Sequence[Request]) -> Iterable[Request]:
        return sorted(requests, key=lambda request: request.rank)

    def next(self) -> Step | None:
        step = self._empty_step()
        budget = self._budget_left = self.max_batch_tokens
        prefilling = [request for request in self.running if request.todo > 1 or not request.made]
        ready = [request for request in self.running if request.todo == 1 and request.made and not request.exhausted]
        if len(ready) >= self.gather_rows or not self._prompts_fill_a_step(prefilling):
            for request in ready:
                # One that is not running any more has given its pages to an older one just now.
                if budget > 0 and request in self.running and self._room_to_grow(request):
                    self._row(request, step)
                    budget -= 1
        for request in prefilling:
            if budget > 0 and request in self.running:
                budget -= self._fill(request, step, budget)
        if budget > 0 and self.waiting and not (self._full and self.running):
            forecast = self._forecast()
            while budget > 0 and self.waiting:
                self._budget_left = budget
                self._full = not self._fits(self.waiting[0], forecast)
                if self._full:
                    break
                request = self.waiting.popleft()
                self._enter(request)
                forecast.add(request)
                budget -= self._fill(request, step, budget)
        return self._checked(step)

    def must_know(self) -> bool:
        growing = [request for request in self.running if request.todo == 1 and not request.exhausted]
        if len(growing) <= self.cache.free_pages:
            return False
        missing = sum(self.cache.missing(request, request.length) for request in growing)
        return missing > self.cache.free_pages + self.cache.droppable_pages

    def finish(self, request: Request) -> None:
        if request.finish_reason is not FinishReason.TIME:
            self._lifetimes.learn(request)
        self._full = False
        super().finish(request)

    def _prompts_fill_a_step(self, prefilling: Sequence[Request]) -> bool:
        tokens = sum(request.todo for request in prefilling)
        if tokens >= self.max_batch_tokens or not self.waiting:
            return tokens >= self.max_batch_tokens
        if (self._full and self.running) or not self._fits(self.waiting[0], self._forecast()):
            return False
        for request in self.waiting:  # as if all of them fitted, and without the prefixes that they bring
            tokens += request.todo
            if tokens >= self.max_batch_tokens:
                return True
        return False

    def _room_to_grow(self, request: Request) -> bool:
        """A page for the next token, if it needs one; the youngest pay for it. False if that was the request itself."""
        while (missing := self.cache.missing(request, request.length)) > self.cache.free_pages:
            if self.cache.evict(missing):
                continue
            youngest = next(reversed(self.running))
            if youngest is not request:
                self._preempt(youngest)
            elif len(self.running) > 1:
                self._preempt(request)
                return False
            elif not self.cache.evict_idle(missing):
                # Alone, it fits: unless a prefix kept from another call holds more than is read of it. Entering
                # anew cuts that prefix down.
                if not any(prefix.wanted < prefix.end for prefix, _ in request.ancestors()):
                    raise RuntimeError(f"no page left for the only running request, {request}")
                self._preempt(request)
                return False
        self.cache.reserve(request, request.length)
        return True

    def _preempt(self, request: Request) -> None:
        assert not request.pending, "its tokens are needed to compute it again, and nobody has seen them"
        self._leave(request)
        self.cache.give_up(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _forecast(self) -> Forecast:
        return Forecast(self.cache, self._lifetimes, self.running, self._longest)

    def _fits(self, request: Request, forecast: Forecast) -> bool:
        """Whether ``request``, the next in the queue, may enter: there is room for it, now and as all of them grow."""
        if not self.running:
            # Alone it always fits (that was checked before the call began), whatever has to go for it.
            return self._make_room_alone(request, request.length)
        then = self.waiting[1] if len(self.waiting) > 1 else None
        # What others wait for with its pages in the cache does not go for a newcomer's sake.
        if not forecast.admits(request, then, self.cache.free_pages + self.cache.droppable_pages, self._late(request)):
            return False
        return self.cache.evict(self.cache.missing_with_ancestors(request, request.length))

    def _late(self, request: Request) -> int:
        """Steps after this one until the prompt of ``request`` is computed, when decode rows go first in each."""
        tokens = request.todo + sum(max(0, cut - prefix.computed) for prefix, cut in request.ancestors())
        left = max(0, tokens - self._budget_left)
        return -(-left // max(1, self.max_batch_tokens - len(self.running)))


class FifoScheduler(QueueScheduler):
    """The plain one: in the order of the list, a step is either prompts or decode rows, and nothing is ever preempted,
    because a request enters only when its longest possible answer fits."""

    def _ordered(self, requests: Sequence[Request]) -> Iterable[Request]:
        return sorted(requests, key=lambda request: (request.index, request.sample))

    def next(self) -> Step | None:
        step = self._empty_step()
        budget = self.max_batch_tokens
        for request in self.running:
            if request.todo > 1 or not request.made:
                budget -= self._fill(request, step, budget)
                if budget <= 0:
                    break
        while budget > 0 and self.waiting and self._fits(self.waiting[0]):
            request = self.waiting.popleft()
            self._enter(request)
            self.cache.reserve(request, request.max_length)
            budget -= self._fill(request, step, budget)
        if not step.tokens:
            ready = [request for request in self.running if not request.exhausted][:budget]
            for request in sorted(ready, key=lambda request: request.rank):
                self._row(request, step)
        return self._checked(step)

    def _fits(self, request: Request) -> bool:
        if not self.running:
            return self._make_room_alone(request, request.max_length)
        needed = self.cache.missing_with_ancestors(request, request.max_length)
        return self._could_have(needed) and self.cache.evict(needed)
