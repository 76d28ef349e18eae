"""The scheduler of beam searches: as GroupScheduler, with the beams of a prompt in the place of a request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...planning.expected_length import ExpectedLength
from ...planning.paged_cache import PagedCache
from ...planning.queue_scheduler import QueueScheduler
from ...planning.requests_and_prefixes import FinishReason, Request
from ...planning.step import Step
from .group import BeamGroup

# Rows of all groups from which they take turns. With fewer, a step of half of them takes a GPU nearly as long as one of
# all, as it reads the same weights: that costs more than the host's time that it hides.
TURNS_FROM = 512


@dataclass
class _Promised:
    """What running groups are expected to add to what they have."""

    pages: int = 0
    slots: int = 0  # for the states of beams that have none yet


class BeamScheduler(QueueScheduler):
    """Beams that go on first, then prompts as far as the token budget goes, then as many new prompts as fit.

    When memory runs short the youngest prompt and its beams give up their pages and are computed again later. The
    oldest never does. If it is alone and has no page left, each of its beams gets pages of its own, which always fit.
    """

    def __init__(self, groups: Mapping[Request, BeamGroup], gather_rows: int = 0, depth: int = 1) -> None:
        """``groups``: by their roots. ``depth``: how many steps may be on their way."""
        self.groups = groups
        self.gather_rows = gather_rows
        self.depth = depth

    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        super().start(requests, cache, max_batch_tokens)
        self.expected = ExpectedLength()
        self._ended_pages, self._ended_tokens = 1, 6  # of searches that are over; a guess to begin with

    def _ordered(self, requests: Sequence[Request]) -> Iterable[Request]:
        return sorted(requests, key=lambda request: request.rank)

    def next(self) -> Step | None:
        step = self._empty_step()
        budget = self.max_batch_tokens
        running = self._to_run
        rows_at_most = -(-self._rows // 2) if self._take_turns(running) else self._rows
        prefilling = [group for group in running if self._has_prefill(group)]
        rows = sum(group.width for group in running) - sum(group.width for group in prefilling)
        wait = rows < self.gather_rows and self._prompts_fill_a_step(prefilling)
        for_images = self._rows_wait_for_images(bool(prefilling))
        for group in prefilling if wait or for_images else running:
            if group.in_step and len(step.rows) >= rows_at_most:
                continue  # its turn is the next one
            # A group that is no longer running has just given its pages to an older one.
            if budget > 0 and group.root in self.running and self._room_to_grow(group):
                budget -= self._add_to_step(group, step, budget)
        if budget > 0 and self.waiting:
            promised = self._promised()
            while budget > 0 and self.waiting and self._fits(self.groups[self.waiting[0]], promised):
                root = self._take_next()
                if root is None:
                    continue
                group = self.groups[root]
                self._enter(group.root)
                group.restore()
                self._promise(promised, group)
                budget -= self._add_to_step(group, step, budget)
        if for_images and not step.tokens:
            return self.next()  # the groups with images have given their pages back
        if not step.tokens and not self._withdrew and any(self.groups[root].complete for root in self.running):
            return None
        return self._checked(step)

    def must_know(self) -> bool:
        return not self._take_turns(self._to_run)

    def _take_turns(self, groups: Sequence[BeamGroup]) -> bool:
        """Whether the next step may be made while another one is on its way; each then has half of the rows.

        Only if there are pages for all ``groups``, which may be in it: none gives up its pages while it runs.
        """
        if self.depth == 1 or self._rows < TURNS_FROM:
            return False
        free = self.cache.free_pages
        # A page for each beam is the most that they may lack: that is counted faster.
        return sum([len(group.beams) for group in groups]) <= free or sum([group.missing for group in groups]) <= free

    @property
    def _to_run(self) -> list[BeamGroup]:
        """The running groups but for those whose next beams are to be chosen, of a step that is on its way."""
        groups = [self.groups[root] for root in self.running]
        return [group for group in groups if not group.complete]

    @property
    def _rows(self) -> int:
        """How many rows a step has with all beams of the running groups, once their prompts have run."""
        return sum([self.groups[root].width for root in self.running])

    def finish(self, request: Request) -> None:
        group = self.groups[request]
        if group.made:
            self.expected.learn(group.made)
            self._ended_pages += group.pages
            self._ended_tokens += group.made
        if request in self.running:
            self._leave(request)
        else:
            self._some_gave_up = True
        group.end()

    def _withdraw(self, request: Request) -> None:
        super()._withdraw(request)
        for answer in self.groups[request].answers:
            answer.end(FinishReason.WITHDRAWN)

    def _has_prefill(self, group: BeamGroup) -> bool:
        """Whether more has to be computed than a token for each beam."""
        if group.in_step:
            return False
        before_last = group.length - 1
        return group.root.todo > 0 or any(beam.computed < before_last for beam in group.beams)

    def _prompts_fill_a_step(self, prefilling: Sequence[BeamGroup]) -> bool:
        tokens = sum(unit.todo for group in prefilling for unit in (group.root, *group.beams))
        if tokens >= self.max_batch_tokens or not self.waiting:
            return tokens >= self.max_batch_tokens
        if not self._fits(self.groups[self.waiting[0]], self._promised()):
            return False
        for root in self.waiting:  # counted as if all of them fitted, and without their prefixes
            tokens += root.todo
            if tokens >= self.max_batch_tokens:
                return True
        return False

    def _add_to_step(self, group: BeamGroup, step: Step, budget: int) -> int:
        """Add what has yet to run of the prompt and its beams, last tokens as rows. Returns the tokens used."""
        beams, used = group.beams, 0
        if group.in_step and not group.logits and len(beams) <= budget:  # mostly
            length = group.length
            for beam in beams:
                beam.computed = length
            step.rows += beams
            return len(beams)
        has_prompt = group.root.todo == 0
        for unit in group.without_logits:
            if used >= budget:
                break
            if has_prompt and unit.todo == 1:
                self._row(unit, step)
                used += 1
            else:
                used += self._fill(unit, step, budget - used)
        return used

    def _room_to_grow(self, group: BeamGroup) -> bool:
        """Give the beams pages for their next tokens, at the cost of the youngest running prompt.

        False if that is the group itself, which then waits.
        """
        if group.has_room:
            return True
        while (missing := group.missing) > self.cache.free_pages:
            if self.cache.evict(missing):
                continue
            youngest = next(reversed(self.running))
            if youngest is not group.root:
                self._preempt(self.groups[youngest])
            elif len(self.running) > 1 or not self._give_own_pages(group):
                self._preempt(group)
                return False
        group.reserve()
        return True

    def _give_own_pages(self, group: BeamGroup) -> bool:
        """Give each beam of the only running group pages of its own: the cache was found large enough for that."""
        group.dissolve()
        if not self.cache.evict_idle(group.unshared_pages):
            return False  # a prefix kept from another call holds more than is read of it: entering again cuts it
        group.restore()
        self.preemptions += 1
        return True

    def _preempt(self, group: BeamGroup) -> None:
        self._leave(group.root)
        group.dissolve()
        self.cache.give_up(group.root)
        self.waiting.appendleft(group.root)
        self.preemptions += 1

    def _fits(self, group: BeamGroup, promised: _Promised) -> bool:
        """Whether the next group may enter: it fits beside what is ``promised`` to the growth of running groups.

        Of slots as many are promised as there will be beams, so none is ever lacking later.
        """
        root = group.root
        if not self.running:
            # A group always fits alone, as was checked before the call began: anything else may have to go.
            return self._make_room_alone(root, root.length, group.unshared_pages, group.width)
        beams = max(self._expected_pages(group), group.unshared_pages)  # beams that come back share no pages
        needed = self.cache.missing_with_ancestors(root, root.length) + beams + promised.pages
        slots = self.cache.missing_slots(root) + group.width + promised.slots
        return self._could_have(needed, slots) and self.cache.evict(needed, slots)

    def _expected_pages(self, group: BeamGroup) -> int:
        """Pages of all beams at the end: as many as they take unshared, or as in the searches that are over, if more.

        Wherever beams part, one of them begins a page, so a long search may have many pages that are half empty.
        """
        tokens = min(max(self.expected.of(group.root), group.made + 1), group.root.max_new_tokens - 1) or 1
        partings = tokens * self._ended_pages / self._ended_tokens
        return max(group.width * self.cache.pages_for(tokens), math.ceil(partings))

    def _promise(self, promised: _Promised, group: BeamGroup) -> None:
        promised.pages += max(0, self._expected_pages(group) - group.pages)
        promised.slots += group.slots_to_come

    def _promised(self) -> _Promised:
        """To all running groups."""
        promised = _Promised()
        for root in self.running:
            self._promise(promised, self.groups[root])
        return promised
