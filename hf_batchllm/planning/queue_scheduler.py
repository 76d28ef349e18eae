"""What the schedulers here have in common: queues, chunks of prompts, pages that are given back."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

from .base_scheduler import BaseScheduler
from .paged_cache import PagedCache
from .requests_and_prefixes import FinishReason, Prefix, Request, Unit
from .step import Chunk, Step

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

    def lengthen(self, request: Request, end: int) -> int:
        """Pages that running requests may need for their next tokens are not to spare."""
        cache = self.cache
        if end <= request.start + len(request.pages) * cache.page_size:
            return max(end, request.length)
        spare = max(0, cache.free_pages - len(self.running))
        end = min(end, request.start + (len(request.pages) + spare) * cache.page_size)
        if end > request.length:
            cache.reserve(request, end)
        return max(end, request.length)

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
        """How many of ``count`` tokens end where a chunk may end. In an empty step there are some, come what may."""
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
