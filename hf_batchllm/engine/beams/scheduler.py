"""What goes into the next step of a beam search: as GroupScheduler has it, with the beams of a prompt for a request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ...planning.paged_cache import PagedCache
from ...planning.scheduler import ExpectedLength, QueueScheduler
from ...planning.units import Branch, Request, Step
from .group import BeamGroup


class BeamScheduler(QueueScheduler):
    """Beams that go on first, then prompts as far as the token budget goes, then newcomers as far as memory goes.

    When memory runs short the youngest prompt gives up what it holds and is computed again later, its beams with it.
    The oldest never does: if it is alone and its pages are spent, its beams get pages of their own, which are enough.
    """

    def __init__(self, groups: Sequence[BeamGroup], gather_rows: int = 0) -> None:
        self.groups: dict[Branch, BeamGroup] = {group.root: group for group in groups}
        self.gather_rows = gather_rows

    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        super().start(requests, cache, max_batch_tokens)
        self.expected = ExpectedLength()
        self._ended_pages, self._ended_tokens = 1, 6  # while nothing is known

    def _ordered(self, requests: Sequence[Request]) -> Iterable[Request]:
        return sorted(requests, key=lambda request: request.rank)

    def next(self) -> Step | None:
        step = self._empty_step()
        budget = self.max_batch_tokens
        behind = [root for root in self.running if self._is_behind(root)]
        rows = sum(root.width for root in self.running) - sum(root.width for root in behind)
        wait = rows < self.gather_rows and self._prompts_fill_a_step(behind)
        for root in behind if wait else list(self.running):
            # One that is not running any more has given its pages to an older one just now.
            if budget > 0 and root in self.running and self._room_to_grow(self.groups[root]):
                budget -= self._take(self.groups[root], step, budget)
        if budget > 0 and self.waiting:
            promised = sum(self._growth(self.groups[root]) for root in self.running)
            while budget > 0 and self.waiting and self._fits(self.groups[self.waiting[0]], promised):
                group = self.groups[self.waiting.popleft()]
                self._enter(group.root)
                group.restore()
                promised += self._growth(group)
                budget -= self._take(group, step, budget)
        return self._checked(step)

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

    def _is_behind(self, root: Branch) -> bool:
        """Whether there is more to compute of a prompt than a token for each beam."""
        return root.todo > 0 or any(beam.todo > 1 for beam in self.groups[root].beams)

    def _prompts_fill_a_step(self, behind: Sequence[Branch]) -> bool:
        units = [unit for root in behind for unit in (root, *self.groups[root].beams)]
        tokens = sum(unit.todo for unit in units)
        if tokens >= self.max_batch_tokens or not self.waiting:
            return tokens >= self.max_batch_tokens
        promised = sum(self._growth(self.groups[root]) for root in self.running)
        if not self._fits(self.groups[self.waiting[0]], promised):
            return False
        for root in self.waiting:  # as if all of them fitted, and without the prefixes that they bring
            tokens += root.todo
            if tokens >= self.max_batch_tokens:
                return True
        return False

    def _take(self, group: BeamGroup, step: Step, budget: int) -> int:
        """What is left of a prompt, or of what its beams have had, then a row for each beam. Returns tokens used."""
        used = 0
        whole = group.root.todo == 0
        for unit in group.waiting_for:
            if used == budget:
                break
            if whole and unit.todo == 1:
                self._row(unit, step)
                used += 1
            else:
                used += self._fill(unit, step, budget - used)
        return used

    def _room_to_grow(self, group: BeamGroup) -> bool:
        """Pages for the beams' next tokens; the youngest pay for them. False if that was the group itself."""
        while (missing := self._missing(group)) > self.cache.free_pages:
            if self.cache.evict(missing):
                continue
            youngest = next(reversed(self.running))
            if youngest is not group.root:
                self._preempt(self.groups[youngest])
            elif len(self.running) > 1 or not self._put_together(group):
                self._preempt(group)
                return False
        for beam in group.beams:
            self.cache.reserve(beam, beam.length)
        return True

    def _missing(self, group: BeamGroup) -> int:
        return sum(self.cache.missing(beam, beam.length) for beam in group.beams)

    def _put_together(self, group: BeamGroup) -> bool:
        """Give each beam of the only group pages of its own: then it has as many as were found to be enough."""
        group.dissolve()
        if not self.cache.evict_idle(group.all_pages):
            return False  # a prefix kept from another call holds more than is read of it: entering cuts it down
        group.restore()
        self.preemptions += 1
        return True

    def _preempt(self, group: BeamGroup) -> None:
        self._leave(group.root)
        group.dissolve()
        self.cache.give_up(group.root)
        self.waiting.appendleft(group.root)
        self.preemptions += 1

    def _fits(self, group: BeamGroup, promised: int) -> bool:
        """Whether a newcomer may enter: what it adds fits beside the pages promised to the growth of those running."""
        root = group.root
        if not self.running:
            # Alone it always fits (that was checked before the call began), whatever has to go for it.
            return self._make_room_alone(root, root.length, group.all_pages)
        beams = max(self._expected_pages(group), group.all_pages)  # what comes back has pages of its own for each
        needed = self.cache.missing_with_ancestors(root, root.length) + beams + promised
        return self._could_have(needed) and self.cache.evict(needed)

    def _expected_pages(self, group: BeamGroup) -> int:
        """Of all beams together, at the end: what each would take alone, or what it came to for those that have ended.

        Each parting of the ways begins a page, so a long search may have many that are half empty.
        """
        tokens = min(max(self.expected.of(group.root), group.made + 1), group.root.max_new_tokens - 1) or 1
        partings = tokens * self._ended_pages / self._ended_tokens
        return max(group.width * self.cache.pages_for(tokens), math.ceil(partings))

    def _growth(self, group: BeamGroup) -> int:
        return max(0, self._expected_pages(group) - group.pages)


def branches(groups: Iterable[BeamGroup]) -> list[Branch]:
    """Every unit from which somebody goes on."""
    return [unit for group in groups for unit in (group.root, *group.beams) if unit.held]
