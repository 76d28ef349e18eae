"""Schedulers: which tokens go into the next step.

A scheduler counts tokens and pages. It neither looks at a token nor waits for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .base_scheduler import BaseScheduler, as_base_scheduler
from .memory_forecast import Forecast, Lifetimes
from .paged_cache import PagedCache
from .queue_scheduler import QueueScheduler
from .requests_and_prefixes import FinishReason, Request
from .step import Step


def make_scheduler(choice: Any, gather_rows: int = 0) -> BaseScheduler:
    """``gather_rows`` as GroupScheduler has it, where the choice is "groups"."""
    if choice == "groups":
        return GroupScheduler(gather_rows)
    return FifoScheduler() if isinstance(choice, str) else as_base_scheduler(choice)


class GroupScheduler(QueueScheduler):
    """The default. Decode rows first, then prompts as far as the token budget goes, then as many new requests as fit.

    Memory alone decides whether a request may enter: its pages must fit beside the running requests, now and later, as
    these are expected to grow and to end. Where the forecast was too low, the youngest running request gives its pages
    back and is computed again later. The oldest never does, so there is always progress.

    Fewer than ``gather_rows`` decode rows wait while prompts fill the step, until there are so many rows or no prompts
    left. That makes fewer steps where few rows cost nearly as much as many (a CPU).
    """

    def __init__(self, gather_rows: int = 0) -> None:
        self.gather_rows = gather_rows

    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        super().start(requests, cache, max_batch_tokens)
        self._longest = max((request.max_new_tokens for request in requests), default=1)
        self._lifetimes = Lifetimes(self._longest)
        self._full = False  # a request did not fit, and none has ended since: asking again would hardly change that
        self._budget_left = max_batch_tokens  # of the step that is being made
        self._pages_in_the_end = 0  # of all running requests, if each came to its longest

    def _ordered(self, requests: Sequence[Request]) -> Iterable[Request]:
        return sorted(requests, key=lambda request: request.rank)

    def next(self) -> Step | None:
        step = self._empty_step()
        budget = self._budget_left = self.max_batch_tokens
        prefilling, ready = self._at_work()
        for request in prefilling:  # before anything is in the step: others may have to give their pages back
            if request.made and request in self.running:  # it has jumped
                self._room_to_grow(request)
        wait = self._rows_wait_for_images(any(request in self.running for request in prefilling))
        if not wait and (len(ready) >= self.gather_rows or not self._prompts_fill_a_step(prefilling)):
            running, page_size = self.running, self.cache.page_size
            for request in ready:
                if budget == 0:
                    break
                if request not in running:  # it has just given its pages to an older one
                    continue
                # Its one token to compute is its last one. Most rows have room for it.
                own_tokens = request.computed + 1 - request.start
                if own_tokens <= len(request.pages) * page_size or self._room_to_grow(request):
                    step.rows.append(request)
                    request.computed += 1
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
                newcomer = self._take_next()
                if newcomer is None:
                    continue
                self._enter(newcomer)
                forecast.add(newcomer)
                budget -= self._fill(newcomer, step, budget)
        return self._checked(step)

    def _at_work(self) -> tuple[list[Request], list[Request]]:
        """Running requests with a prompt to compute, and those that can have their next token."""
        prefilling: list[Request] = []
        ready: list[Request] = []
        for request in self.running:  # thousands in each step: plain sums in place of properties
            made = len(request.generated) + request.pending
            todo = request.prompt_tokens + made - request.computed
            if todo > 1 or not made:
                prefilling.append(request)
            elif todo == 1 and made < request.max_new_tokens:
                ready.append(request)
        return prefilling, ready

    def must_know(self) -> bool:
        if len(self.running) <= self.cache.free_pages:
            return False
        free, page_size = self.cache.free_pages, self.cache.page_size
        growing = missing = 0
        for request in self.running:  # as in `_at_work`
            made = len(request.generated) + request.pending
            length = request.prompt_tokens + made
            if length - request.computed == 1 and made < request.max_new_tokens:
                growing += 1
                lacking = -((request.start - length) // page_size) - len(request.pages)
                if lacking > 0:
                    missing += lacking
        return growing > free and missing > free + self.cache.droppable_pages

    def finish(self, request: Request) -> None:
        if request.finish_reason is not FinishReason.TIME:  # none that was withdrawn comes here
            self._lifetimes.learn(request)
        self._full = False
        super().finish(request)

    def _prompts_fill_a_step(self, prefilling: Sequence[Request]) -> bool:
        tokens = sum(request.todo for request in prefilling)
        if tokens >= self.max_batch_tokens or not self.waiting:
            return tokens >= self.max_batch_tokens
        if (self._full and self.running) or not self._fits(self.waiting[0], self._forecast()):
            return False
        for request in self.waiting:  # counted as if all of them fitted, and without their prefixes
            tokens += request.todo
            if tokens >= self.max_batch_tokens:
                return True
        return False

    def _room_to_grow(self, request: Request) -> bool:
        """Give the request a page for its next token, if it needs one, at the cost of the youngest running request.

        False if that is the request itself, which then waits.
        """
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
                # A request fits alone, unless a prefix kept from another call holds more than is read of it. Entering
                # again cuts that prefix.
                if not any(prefix.read_end < prefix.end for prefix, _ in request.prefixes()):
                    raise RuntimeError(f"no page left for the only running request, {request}")
                self._preempt(request)
                return False
        self.cache.reserve(request, request.length)
        return True

    def _preempt(self, request: Request) -> None:
        assert not request.pending, "its tokens are needed to compute it again, and the host has not seen all of them"
        self._leave(request)
        self.cache.give_up(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _enter(self, request: Request) -> None:
        super()._enter(request)
        self._pages_in_the_end += request.most_pages(self.cache.page_size)

    def _leave(self, request: Request) -> None:
        super()._leave(request)
        self._pages_in_the_end -= request.most_pages(self.cache.page_size)
        if not self.running:  # whatever a scheduler of the user's has made of limits meanwhile
            self._pages_in_the_end = 0

    def _forecast(self) -> Forecast:
        # Requests that wait hold no pages.
        new = self._pages_in_the_end - self.cache.request_pages
        return Forecast(self.cache, self._lifetimes, self.running, self._longest, new)

    def _fits(self, request: Request, forecast: Forecast) -> bool:
        """Whether ``request``, the next in the queue, may enter: it fits now, and later beside those that grow."""
        if not self.running:
            # A request always fits alone, as was checked before the call began: anything else may have to go.
            return self._make_room_alone(request, request.length)
        # Kept prefixes on which waiting requests stand are not given up for a newcomer.
        cache = self.cache
        free = cache.free_pages + cache.droppable_pages
        if not forecast.has_room_to_the_end(request, free):
            then = self.waiting[1] if len(self.waiting) > 1 else None
            if not forecast.admits(request, then, free, self._delay(request)):
                return False
        slots = cache.missing_slots(request)
        if cache.slots is not None and slots > cache.slots.free + cache.droppable_slots:
            return False
        return cache.evict(cache.missing_with_ancestors(request, request.length), slots)

    def _delay(self, request: Request) -> int:
        """How many steps after this one until the prompt of ``request`` is computed: decode rows go first in each."""
        tokens = request.todo + sum(max(0, end - below.computed) for below, end in request.ancestors())
        left = max(0, tokens - self._budget_left)
        return -(-left // max(1, self.max_batch_tokens - len(self.running)))


class FifoScheduler(QueueScheduler):
    """The plain one: in the order of the list, each step is either prompts or decode rows.

    No request is ever preempted, because a request enters only when its longest possible answer fits.
    """

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
            newcomer = self._take_next()
            if newcomer is None:
                continue
            self._enter(newcomer)
            self.cache.reserve(newcomer, newcomer.max_length)
            budget -= self._fill(newcomer, step, budget)
        if not step.tokens:
            ready = [request for request in self.running if not request.exhausted][:budget]
            for request in sorted(ready, key=lambda request: request.rank):
                self._row(request, step)
        return self._checked(step)

    def _fits(self, request: Request) -> bool:
        if not self.running:
            return self._make_room_alone(request, request.max_length)
        needed, slots = (
            self.cache.missing_with_ancestors(request, request.max_length),
            self.cache.missing_slots(request),
        )
        return self._could_have(needed, slots) and self.cache.evict(needed, slots)
