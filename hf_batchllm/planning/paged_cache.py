"""PagedCache: who owns which page of the KV cache, and for how long. Bookkeeping only; the tensors are KVStorage's.

Pages are ragged: each unit starts on a fresh page wherever its base ends, so nothing is hashed, aligned or copied.
Only pages that are *new* are ever asked for: what a unit stands on is there already, or is counted once.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterable

import numpy as np

from .units import Branch, Prefix, Request, Unit, units_below


class OutOfPages(RuntimeError):
    """More pages were asked for than are free. Schedulers look first, so this is a mistake of theirs."""


def _counts(unit: Unit) -> bool:
    """Whether it is a request; the branches of one do not count."""
    return isinstance(unit, Request) and (not isinstance(unit, Branch) or unit is unit.root)


class PagedCache:
    def __init__(self, num_pages: int, page_size: int, keep_prefixes: int = 0) -> None:
        assert num_pages > 0 and page_size > 0
        self.num_pages = num_pages
        self.page_size = page_size
        self.keep_prefixes = keep_prefixes
        # A heap gives the lowest page first: neighbours in a unit are mostly neighbours in memory.
        self._free = list(range(num_pages))
        self._holders: dict[Unit, None] = {}  # every unit that has pages
        self._kept: OrderedDict[Prefix, None] = OrderedDict()  # least recently used first
        self.requests = 0  # that have pages
        self.peak_pages = 0
        self.lost_tokens = 0  # computed, then given up for want of memory: they have to be computed again

    def start_counting(self) -> None:
        """A call begins."""
        self.peak_pages = self.num_pages - len(self._free)
        self.lost_tokens = 0

    # -- counting ----------------------------------------------------------------------------------------------

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def kept_prefixes(self) -> int:
        return len(self._kept)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def missing(self, unit: Unit, upto: int) -> int:
        """Pages to add so that ``unit`` has room for its tokens before position ``upto``."""
        return max(0, self.pages_for(upto - unit.start) - len(unit.pages))

    def missing_with_ancestors(self, unit: Unit, upto: int) -> int:
        """The same, with what is missing of the prefixes that it stands on."""
        return self.missing(unit, upto) + sum(self.missing(prefix, cut) for prefix, cut in unit.ancestors())

    def fits_alone(self, request: Request) -> bool:
        """Whether the request can run to its end when everything else has left the cache."""
        pages = request.most_pages(self.page_size)
        pages += sum(self.pages_for(prefix.wanted - prefix.start) for prefix, _ in request.ancestors())
        return pages <= self.num_pages

    def grow(self, num_pages: int) -> None:
        """More pages; those that there are stay as they are."""
        assert num_pages >= self.num_pages
        for page in range(self.num_pages, num_pages):
            heapq.heappush(self._free, page)
        self.num_pages = num_pages

    def compact(self) -> list[int]:
        """Shrink to the pages that are held. Returns the page that each of those left was before."""
        before = [page for unit in self._holders for page in unit.pages]
        after = 0
        for unit in self._holders:
            unit.pages[:] = range(after, after + len(unit.pages))
            after += len(unit.pages)
        self._free = []
        self.num_pages = after
        return before

    # -- pages -------------------------------------------------------------------------------------------------

    def reserve(self, unit: Unit, upto: int) -> None:
        """Give ``unit`` the pages that it lacks for its tokens before position ``upto``."""
        count = self.missing(unit, upto)
        if count == 0:
            return
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free")
        self.requests += not unit.pages and _counts(unit)
        unit.pages.extend(heapq.heappop(self._free) for _ in range(count))
        self._holders[unit] = None
        self.peak_pages = max(self.peak_pages, self.num_pages - len(self._free))

    def release(self, unit: Unit) -> None:
        """Take a unit's pages back. What it held would have to be computed again."""
        self.requests -= bool(unit.pages) and _counts(unit)
        for page in unit.pages:
            heapq.heappush(self._free, page)
        unit.pages.clear()
        unit.computed = unit.start
        self._holders.pop(unit, None)

    def cut(self, unit: Unit, upto: int) -> None:
        """Take back the pages of a unit that nobody reads beyond position ``upto``."""
        room = self.pages_for(upto - unit.start)
        if room == 0:
            self.release(unit)
            return
        for page in unit.pages[room:]:
            heapq.heappush(self._free, page)
        del unit.pages[room:]
        unit.computed = min(unit.computed, upto)

    def give_up(self, unit: Unit) -> None:
        """Release a unit that is still needed: memory is short."""
        self.lost_tokens += unit.computed - unit.start
        unit.lost = max(unit.lost, unit.computed)
        self.release(unit)

    def still_lost(self, requests: Iterable[Request]) -> int:
        """Of the lost tokens, those of ``requests`` and what they stand on that have not been computed again."""
        return sum(max(0, unit.lost - unit.computed) for unit in units_below([*requests]))

    # -- lifetimes ---------------------------------------------------------------------------------------------

    def attach(self, unit: Unit, base: Unit | None) -> None:
        """``unit`` stands on ``base`` from now on and keeps it alive."""
        assert unit.base is None and not unit.pages
        if base is not None:
            assert base.start <= unit.start <= base.readable
            unit.base = base
            base.refs += 1
            base.wanted = max(base.wanted, unit.start)

    def retire(self, unit: Unit, keep: bool = True) -> None:
        """``unit`` has ended: its pages go, and so does every unit that nobody else stands on (unless kept).

        Of a branch on which others stand, what they read stays.
        """
        ending: Unit | None = unit
        while ending is not None:
            if ending.refs > 0:
                if isinstance(ending, Branch) and not ending.held:
                    self.cut(ending, ending.wanted)
                break
            if ending is not unit and isinstance(ending, Branch) and ending.held:
                break
            if isinstance(ending, Prefix):
                if ending.kept:
                    break
                if keep and self._keep(ending):
                    break
            self.lost_tokens -= max(0, ending.lost - ending.computed)  # it ends without having them computed again
            self.release(ending)
            base, ending.base = ending.base, None
            if base is not None:
                base.refs -= 1
                if base.refs == 0:
                    base.wanted = base.start  # if it is kept, those who come may read less of it
            ending = base
        self._trim()

    @property
    def evictable_pages(self) -> int:
        """At most so many pages would ``evict`` free."""
        return sum(len(prefix.pages) for prefix in self._kept if prefix.running == 0)

    @property
    def droppable_pages(self) -> int:
        """So many pages ``evict`` frees for certain: of kept prefixes on which nobody stands, not even who waits."""
        return sum(len(prefix.pages) for prefix in self._kept if prefix.refs == 0)

    def evict(self, pages: int) -> bool:
        """Drop kept prefixes that nothing stands on until ``pages`` are free; least recently used first.

        They are gone even if that was not enough: a newcomer that could wait asks for ``evictable_pages`` first.
        """
        while len(self._free) < pages:
            idle = next((prefix for prefix in self._kept if prefix.refs == 0), None)
            if idle is None:
                return False
            self._drop(idle)
        return True

    def evict_idle(self, pages: int) -> bool:
        """As ``evict``, then prefixes without a *running* request: their members compute them again when they come."""
        if self.evict(pages):
            return True
        for prefix in [unit for unit in self._holders if isinstance(unit, Prefix)]:
            if prefix.running == 0:
                if prefix.kept:
                    del self._kept[prefix]
                    prefix.kept = False
                # No more of it than somebody reads comes back, and only that is lost.
                prefix.end = prefix.wanted
                prefix.computed = min(prefix.computed, prefix.end)
                self.give_up(prefix)
            if len(self._free) >= pages:
                return True
        return False

    # -- prefixes kept from one call to the next ---------------------------------------------------------------

    def match(self, ids: np.ndarray, limit: int, key: Hashable) -> tuple[Prefix | None, int]:
        """The kept prefix that agrees longest with ``ids[:limit]``, and for how many tokens."""
        best, longest = None, 0
        for prefix in self._kept:
            reach = min(prefix.computed, limit)
            if prefix.key != key or reach <= longest:
                continue
            differ = np.flatnonzero(prefix.ids[:reach] != ids[:reach])
            agree = int(differ[0]) if len(differ) else reach
            if agree > longest:
                best, longest = prefix, agree
        if best is None:
            return None, 0
        self._kept.move_to_end(best)
        while longest <= best.start:  # the agreement ends inside an outer prefix
            assert best.base is not None
            best = best.base
        return best, longest

    def forget_kept(self) -> None:
        """Drop every kept prefix that nothing stands on: the weights have changed, or a call broke off."""
        while idle := [prefix for prefix in self._kept if prefix.refs == 0]:
            for prefix in idle:
                self._drop(prefix)

    def _keep(self, prefix: Prefix) -> bool:
        if self.keep_prefixes == 0 or prefix.computed < prefix.end or prefix.end == prefix.start:
            return False
        if any(below.computed < cut for below, cut in prefix.ancestors()):
            return False  # what it stands on was evicted and has not come back: nobody could read it
        if self.match(prefix.ids, prefix.end, prefix.key)[1] == prefix.end:
            return False  # a call that made no use of kept prefixes had to compute it again
        prefix.kept = True
        prefix.lost = prefix.start  # another call counts anew
        prefix.ids = np.array(prefix.ids[: prefix.end])  # lets the prompt itself go
        self._kept[prefix] = None
        return True

    def _trim(self) -> None:
        while len(self._kept) > self.keep_prefixes:
            idle = next((prefix for prefix in self._kept if prefix.refs == 0), None)
            if idle is None:
                return
            self._drop(idle)

    def _drop(self, prefix: Prefix) -> None:
        del self._kept[prefix]
        prefix.kept = False
        self.retire(prefix, keep=False)

    # -- proof -------------------------------------------------------------------------------------------------

    def check_integrity(self, alive: Iterable[Unit] | None = None) -> None:
        """Every page is free or has one holder, and what units say of themselves and of each other agrees.

        ``alive``: every request that has not ended. With it, a prefix that outlives its readers shows as well.
        """
        held = [page for unit in self._holders for page in unit.pages]
        assert sorted(held + self._free) == list(range(self.num_pages)), "a page is lost, or has two owners"
        assert self.requests == sum(map(_counts, self._holders)), "requests are miscounted"
        units = units_below([*self._holders, *self._kept, *(alive or ())])
        standing = dict.fromkeys(units, 0)
        for unit in units:
            assert (unit in self._holders) == bool(unit.pages), f"{unit} is listed wrongly among the holders"
            room = unit.start + len(unit.pages) * self.page_size
            assert unit.start <= unit.computed <= room, f"{unit} overflows"
            if isinstance(unit, Prefix):
                assert unit.computed <= unit.end, f"{unit} is computed beyond its end"
                assert unit.kept == (unit in self._kept), f"{unit} is listed wrongly among the kept prefixes"
                assert not unit.kept or unit.computed == unit.end, f"{unit} is kept and not complete"
            if unit.base is not None:
                standing[unit.base] += 1
                assert unit.base.start <= unit.start <= unit.base.readable, f"{unit} reads beyond {unit.base}"
                assert unit.start <= unit.base.wanted, f"{unit} reads more of {unit.base} than that knows"
            if isinstance(unit, Request) and unit.computed > unit.start:
                for prefix, cut in unit.ancestors():
                    assert prefix.computed >= cut, f"{unit} was computed before {prefix}"
            if isinstance(unit, Branch):
                assert unit.computed <= unit.length, f"{unit} is computed beyond its end"
        for below, count in standing.items():
            assert below.refs >= count, f"{below} counts fewer units than the {count} that stand on it"
            if isinstance(below, Request) and not isinstance(below, Branch):
                assert below.refs == 0, f"{below} is no unit to stand on"
                continue
            stays = below.held if isinstance(below, Branch) else below.kept
            assert alive is None or below.refs == count, f"{below} counts more units than the {count} on it"
            assert alive is None or count or stays, f"{below} has outlived its readers"
