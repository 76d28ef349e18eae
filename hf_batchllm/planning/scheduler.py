"""Schedulers: which tokens go into the next step.

A scheduler counts tokens and pages. It neither looks at a token nor waits for one.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from .base_scheduler import BaseScheduler, as_base_scheduler
from .memory_forecast import Forecast, Lifetimes
from .paged_cache import PagedCache
from .requests_and_prefixes import FinishReason, Prefix, Request, Unit
from .step import Chunk, Step


def make_scheduler(choice: Any, gather_rows: int = 0) -> BaseScheduler:
    """``gather_rows`` as GroupScheduler has it, where the choice is "groups"."""
    if choice == "groups":
        return GroupScheduler(gather_rows)
    return FifoScheduler() if isinstance(choice, str) else as_base_scheduler(choice)


_FIRST_TIMES = 4  # how often rows run in a row at first, if their answers may stop
_SHORTER_BURSTS = 4  # bursts are so many times shorter where requests wait for the memory of answers that may stop


class QueueScheduler(BaseScheduler):
    """What the schedulers here have in common: they keep queues, cut prompts into chunks and give pages back."""

    runs_ahead = True
    ends_waiting = True
    takes_jumps = True
    asks_claims = True

    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        self.cache = cache
        self.max_batch_tokens = self._given_tokens = max_batch_tokens
        self.waiting = deque(self._ordered(requests))
        self.running: dict[Request, None] = {}  # oldest first; a dict, so that one can leave from the middle
        self.preemptions = 0
        self._some_gave_up = self._withdrew = False
        self._at_work_now: set[Unit] = set()  # units with a chunk in the step that is being made
        self._rows_left_no_room = False  # in the latest step, for an image that is not to be cut

    def limit_steps(self, tokens: int | None) -> None:
        self.max_batch_tokens = self._given_tokens if tokens is None else min(self._given_tokens, tokens)

    @abstractmethod
    def _ordered(self, requests: Sequence[Request]) -> Iterable[Request]:
        """The order in which requests are let in."""

    def finish(self, request: Request) -> None:
        if request in self.running:
            self._leave(request)
        else:
            self._some_gave_up = True  # many requests do so at once: `_empty_step` takes them out together
        self.cache.retire(request)

    def _take_next(self) -> Request | None:
        """The next request of the queue, which is to enter now; None if another process has it by now."""
        request = self.waiting.popleft()
        if self.claims is None or self.claims.take(request.index):
            return request
        self._withdraw(request)
        self._withdrew = True
        return None

    def _withdraw(self, request: Request) -> None:
        request.end(FinishReason.WITHDRAWN)
        self.cache.retire(request)

    def _empty_step(self) -> Step:
        if self._some_gave_up:
            self.waiting = deque(request for request in self.waiting if not request.done)
            self._some_gave_up = False
        self._withdrew = False
        self._at_work_now.clear()
        return Step()

    def repeat(self, step: Step, most: int) -> int:
        """The pages of all runs are reserved here."""
        rows = step.rows
        if len(rows) < sum(not request.exhausted for request in self.running):
            return 1  # others wait for their turn
        left = [request.max_new_tokens - request.made for request in rows]
        times = min(most, max(left))
        if any(request.can_stop for request in rows):
            # Two bursts are launched when an answer stops: no more runs in vain than about what was made by then.
            times = min(times, max(_FIRST_TIMES, max(request.made for request in rows) // 2))
        if self.waiting:  # for memory: an answer that ends makes room
            times = min(times, *left)
            if any(request.can_stop for request in rows):
                times = min(times, max(1, most // _SHORTER_BURSTS))

        def ends(times: int) -> list[int]:
            # The step itself was counted as computed; the last token is sampled and does not run.
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
        """Let a request run: reserve pages for its whole prompt, and for the missing part of its prefixes."""
        if request.base is not None:
            for prefix, end in request.prefixes():
                self.cache.reserve(prefix, end)
                prefix.running += 1
        self.cache.reserve(request, request.length)
        self.running[request] = None

    def _make_room_alone(self, request: Request, upto: int, pages: int = 0, slots: int = 0) -> bool:
        """Make room for a request, and for so much beside it, while nothing runs. Kept prefixes may have to go."""
        # Count the request's own prefixes as running: otherwise they could go first, and be computed again.
        chain = [prefix for prefix, _ in request.prefixes()]
        for prefix in chain:
            prefix.running += 1
        try:
            slots += self.cache.missing_slots(request)
            if self.cache.evict_idle(self.cache.missing_with_ancestors(request, upto) + pages, slots):
                return True
        finally:
            for prefix in chain:
                prefix.running -= 1
        # A prefix kept from another call may hold more pages than this call reads. Free everything; the call computes
        # only the part that it reads.
        return self.cache.evict_idle(self.cache.num_pages)

    def _could_have(self, pages: int, slots: int = 0) -> bool:
        """Whether so many pages and slots are free, or held by prefixes of other calls alone."""
        cache = self.cache
        enough = cache.slots is None or slots <= cache.slots.free + cache.evictable_slots
        return enough and pages <= cache.free_pages + cache.evictable_pages

    def _leave(self, request: Request) -> None:
        del self.running[request]
        below = request.base
        while below is not None:  # as `prefixes`, faster
            if isinstance(below, Prefix):
                below.running -= 1
            below = below.base

    def _fill(self, request: Request, step: Step, budget: int) -> int:
        """Put the rest of the request's prompt into the step, outermost prefix first. Returns the tokens used."""
        used, carries_states = 0, self.cache.slots is not None
        parts: list[tuple[Unit, int]] = [(request, request.length)]
        if not request.stands_on_computed():
            parts[:0] = request.ancestors()
        for unit, end in parts:
            count = min(end - unit.computed, budget - used)
            if unit.two_way is not None and count > 0:
                count = self._whole_images(unit, count, step)
            if count > 0 and carries_states:
                # It begins with a state that is only known when the step is over in which the unit below ends.
                if unit.computed == unit.start and unit.state_source in self._at_work_now:
                    break
                self._at_work_now.add(unit)
            if count > 0:
                step.chunks.append(Chunk(unit, unit.computed, unit.computed + count))
                unit.computed += count
                used += count
            if unit.computed < end:
                break
        return used

    def _whole_images(self, unit: Unit, count: int, step: Step) -> int:
        """Of ``count`` tokens as many as end where a chunk may end. In an empty step there are some, come what may."""
        begin = unit.computed
        whole = unit.chunk_end(begin, begin + count) - begin
        if whole == 0 and step.rows:
            self._rows_left_no_room = True
        return whole if whole or step.rows or step.chunks else unit.shortest_chunk_end(begin) - begin

    def _rows_wait_for_images(self, prefilling: bool) -> bool:
        """Whether the next step is for prompts alone: else an image could wait until nearly all rows have ended."""
        wait, self._rows_left_no_room = self._rows_left_no_room and prefilling, False
        return wait

    def _row(self, request: Request, step: Step) -> None:
        step.rows.append(request)
        request.computed += 1

    def _checked(self, step: Step) -> Step | None:
        if self._withdrew and not step.tokens:
            return self.next()  # room, and tokens for this step, were counted on that are another's now
        if step.rows or step.chunks:
            if self.cache.slots is not None:
                step.copies = self.cache.slots.copies()
            return step
        unseen = any(request.pending for request in self.running)  # tokens that are still to come may end requests
        if (self.running or self.waiting) and not unseen:
            raise RuntimeError(
                f"the scheduler is stuck: {len(self.running)} requests running, {len(self.waiting)} waiting, "
                f"{self.cache.free_pages} of {self.cache.num_pages} pages free"
            )
        return None


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
