"""PagedCache: which unit owns which pages of the KV cache, and for how long. The tensors themselves are KVStorage's.

Each unit starts on a fresh page wherever its base ends, so nothing is hashed, aligned or copied. A unit asks for pages
of its own tokens only: those of its base belong to the base, and are counted once.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterable

import numpy as np

from .requests_and_prefixes import NO_SLOT, Branch, Prefix, Request, Unit, units_below
from .state_slots import StateSlots


class OutOfPages(RuntimeError):
    """More pages, or slots, were asked for than are free. A scheduler looks first, so the mistake is there."""


def _is_counted(unit: Unit) -> bool:
    """Whether ``unit`` counts as a request: the beams of a search count as one, by their root."""
    return isinstance(unit, Request) and (not isinstance(unit, Branch) or unit is unit.root)


class PagedCache:
    """``keep_prefixes``: how many prefixes may stay for the next call.

    ``slots``: of a model whose layers carry states; each unit with pages has one.
    """

    def __init__(self, num_pages: int, page_size: int, keep_prefixes: int = 0, slots: StateSlots | None = None) -> None:
        assert num_pages > 0 and page_size > 0
        self.num_pages = num_pages
        self.page_size = page_size
        self.keep_prefixes = keep_prefixes
        self.slots = slots
        # A heap, which gives the lowest page first: a unit's pages are mostly neighbours in memory.
        self._free = list(range(num_pages))
        self._holders: dict[Unit, None] = {}  # every unit that has pages
        self._kept: OrderedDict[Prefix, None] = OrderedDict()  # least recently used first
        self.requests = 0  # how many requests have pages
        self.request_pages = 0  # that requests have
        self.peak_pages = 0
        self.lost_tokens = 0  # computed, then given up for want of memory, and needed again

    def start_counting(self) -> None:
        """A call begins: count its peak and its lost tokens from here.

        Kept prefixes, and the units below them, may have lost tokens in earlier calls: these are no loss of this call.
        The requests that stood on them are gone, so less of them may be read than before.
        """
        self.peak_pages = self.num_pages - len(self._free)
        if self.slots is not None:
            self.slots.most = self.slots.taken
        self.lost_tokens = 0
        for unit in units_below([*self._kept]):  # a base comes before what stands on it
            unit.lost_end, unit.read_end = unit.first_computed, unit.start
            if unit.base is not None:
                unit.base.read_end = max(unit.base.read_end, unit.first_computed)

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
        """Pages that ``unit`` lacks for its tokens before position ``upto``."""
        missing = -((unit.start - upto) // self.page_size) - len(unit.pages)
        return missing if missing > 0 else 0

    def missing_with_ancestors(self, unit: Unit, upto: int) -> int:
        """The same, with the pages that its ancestors lack for what it reads of them."""
        missing = self.missing(unit, upto)
        below = unit.base
        while below is not None:
            missing += self.missing(below, unit.first_computed)
            unit, below = below, below.base
        return missing

    def missing_slots(self, unit: Unit) -> int:
        """Slots that ``unit`` and its ancestors lack, for a model whose layers carry states."""
        if self.slots is None:
            return 0
        missing, below = int(not unit.pages), unit.base
        while below is not None:
            missing += not below.pages and below.start < unit.start
            unit, below = below, below.base
        return missing

    def _slots_alone(self, unit: Unit) -> int:
        """Slots that ``unit`` takes with all that it stands on, and with its beams."""
        beams = unit.width if isinstance(unit, Branch) else 0
        return 1 + beams + sum(below.start < end for below, end in unit.ancestors())

    def fits_alone(self, request: Request, pages_below: int | None = None) -> bool:
        """Whether the request can run to its end when everything but its ancestors has left the cache.

        pages_below: as the method of this name gives it, where that is known.
        """
        if self.slots is not None and self._slots_alone(request) > self.slots.count:
            return False
        below = self.pages_below(request) if pages_below is None else pages_below
        return request.most_pages(self.page_size) + below <= self.num_pages

    def pages_below(self, unit: Unit) -> int:
        """Pages of all that is read of the units below this one."""
        return sum(self.pages_for(below.read_end - below.start) for below, _ in unit.ancestors())

    def grow(self, num_pages: int, num_slots: int = 0) -> None:
        """Add pages and slots. The present ones stay as they are."""
        if self.slots is not None:
            self.slots.grow(num_slots)
        assert num_pages >= self.num_pages
        for page in range(self.num_pages, num_pages):
            heapq.heappush(self._free, page)
        self.num_pages = num_pages

    def compact_slots(self) -> list[int]:
        """Shrink the slots of states to those that are held: see ``compact``."""
        return [] if self.slots is None else self.slots.compact(list(self._holders))

    def compact(self) -> list[int]:
        """Shrink to the pages that units hold, numbered anew. Returns the old number of each of them."""
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
        free = self._free
        if count > len(free):
            raise OutOfPages(f"{count} pages wanted, {len(free)} free")
        if self.slots is not None and not unit.pages:
            if not self.slots.free:
                raise OutOfPages("a slot for a state is wanted, none is free")
            self.slots.take(unit)
        if isinstance(unit, Request):
            self.requests += not unit.pages and _is_counted(unit)
            self.request_pages += count
        if count == 1:
            unit.pages.append(heapq.heappop(free))
        else:
            unit.pages.extend([heapq.heappop(free) for _ in range(count)])
        self._holders[unit] = None
        taken = self.num_pages - len(free)
        if taken > self.peak_pages:
            self.peak_pages = taken

    def release(self, unit: Unit) -> None:
        """Take a unit's pages back. To be read again, it would have to be computed again."""
        if unit.pages and isinstance(unit, Request):
            self.requests -= _is_counted(unit)
            self.request_pages -= len(unit.pages)
        for page in unit.pages:
            heapq.heappush(self._free, page)
        if self.slots is not None and unit.slot != NO_SLOT:
            self.slots.give_back(unit)
        unit.pages.clear()
        unit.computed = unit.first_computed
        self._holders.pop(unit, None)

    def cut(self, unit: Unit, upto: int) -> None:
        """Take back a unit's pages beyond position ``upto``, which no unit reads."""
        room = self.pages_for(upto - unit.start)
        if room == 0:
            self.release(unit)
            return
        if isinstance(unit, Request):
            self.request_pages -= max(0, len(unit.pages) - room)
        for page in unit.pages[room:]:
            heapq.heappush(self._free, page)
        del unit.pages[room:]
        unit.computed = min(unit.computed, upto)

    def give_up(self, unit: Unit) -> None:
        """Release a unit that is still needed, because memory is short."""
        self.lost_tokens += unit.computed - unit.first_computed
        unit.lost_end = max(unit.lost_end, unit.computed)
        self.release(unit)

    def still_lost(self, requests: Iterable[Request]) -> int:
        """The lost tokens of ``requests``, kept prefixes and their ancestors that have not been computed again."""
        return sum(max(0, unit.lost_end - unit.computed) for unit in units_below([*requests, *self._kept]))

    # -- lifetimes ---------------------------------------------------------------------------------------------

    def attach(self, unit: Unit, base: Unit | None) -> None:
        """From now on ``unit`` stands on ``base``, which stays as long as the unit does."""
        assert unit.base is None and not unit.pages
        if base is not None:
            end = unit.first_computed
            assert base.start <= unit.start <= end <= base.readable_end
            unit.base = base
            base.refs += 1
            if end > base.read_end:
                base.read_end = end

    def retire(self, unit: Unit, keep: bool = True) -> None:
        """``unit`` has ended: release it, and every ancestor that no other unit stands on.

        Prefixes that are kept stay (``keep``: whether more may be kept now), and of a beam as much as others read.
        """
        ending: Unit | None = unit
        while ending is not None:
            if isinstance(ending, Branch):
                if ending.refs > 0:
                    if not ending.in_use:
                        self.cut(ending, ending.read_end)
                        if self.slots is not None and ending.slot != NO_SLOT:
                            self.slots.give_back(ending)
                    break
                if ending.in_use and ending is not unit:
                    break
            elif ending.refs > 0 or (isinstance(ending, Prefix) and (ending.kept or (keep and self._keep(ending)))):
                break
            if ending.lost_end > ending.computed:
                self.lost_tokens -= ending.lost_end - ending.computed  # they are not needed again
            self.release(ending)
            base, ending.base = ending.base, None
            if base is not None:
                base.refs -= 1
                if base.refs == 0:
                    base.read_end = base.start  # if it is kept, later readers may read less of it
            ending = base
        self._trim()

    @property
    def evictable_pages(self) -> int:
        """The most pages that ``evict`` may free: it spares kept prefixes on which waiting requests stand."""
        return sum(len(prefix.pages) for prefix in self._kept if prefix.running == 0)

    @property
    def droppable_pages(self) -> int:
        """Pages that ``evict`` frees for certain: those of kept prefixes on which no unit stands."""
        return sum(len(prefix.pages) for prefix in self._kept if prefix.refs == 0)

    @property
    def evictable_slots(self) -> int:
        return sum(prefix.running == 0 for prefix in self._kept)

    @property
    def droppable_slots(self) -> int:
        return sum(prefix.refs == 0 for prefix in self._kept)

    def _are_free(self, pages: int, slots: int) -> bool:
        return len(self._free) >= pages and (self.slots is None or self.slots.free >= slots)

    def evict(self, pages: int, slots: int = 0) -> bool:
        """Drop kept prefixes that no unit stands on until so much is free; the least recently used first.

        They are dropped even if that is not enough, so where a request could wait ask for ``evictable_pages`` first.
        """
        while not self._are_free(pages, slots):
            idle = next((prefix for prefix in self._kept if prefix.refs == 0), None)
            if idle is None:
                return False
            self._drop(idle)
        return True

    def evict_idle(self, pages: int, slots: int = 0) -> bool:
        """Evict, then give up prefixes without a *running* request: waiting ones compute them again."""
        if self.evict(pages, slots):
            return True
        for prefix in [unit for unit in self._holders if isinstance(unit, Prefix)]:
            if prefix.running == 0:
                if prefix.kept:
                    del self._kept[prefix]
                    prefix.kept = False
                # Only what is read of it will be computed again, so only that counts as lost.
                prefix.end = prefix.read_end
                prefix.computed = min(prefix.computed, prefix.end)
                self.give_up(prefix)
            if self._are_free(pages, slots):
                return True
        return False

    # -- prefixes kept from one call to the next ---------------------------------------------------------------

    def match(self, ids: np.ndarray, limit: int, key: Hashable) -> tuple[Prefix | None, int]:
        """The kept prefix that agrees longest with ``ids[:limit]``, and for how many tokens.

        Where layers carry states, a prefix is of use at its end alone: the only place whose state is known.
        """
        if self.slots is not None:
            return self._match_whole(ids, limit, key)
        best, longest = None, 0
        for prefix in self._kept:
            most = min(prefix.computed, limit)
            if prefix.key != key or most <= longest:
                continue
            differ = np.flatnonzero(prefix.ids[:most] != ids[:most])
            agree = int(differ[0]) if len(differ) else most
            if agree > longest:
                best, longest = prefix, agree
        if best is None:
            return None, 0
        self._kept.move_to_end(best)
        while longest <= best.start:  # the agreement ends inside an outer prefix
            assert isinstance(best.base, Prefix)
            best = best.base
        return best, longest

    def _match_whole(self, ids: np.ndarray, limit: int, key: Hashable) -> tuple[Prefix | None, int]:
        best: Prefix | None = None
        for unit in units_below([*self._kept]):
            assert isinstance(unit, Prefix)
            known = unit.slot != NO_SLOT and unit.computed == unit.end and unit.key == key
            longer = known and (0 if best is None else best.end) < unit.end <= limit
            if longer and np.array_equal(unit.ids[: unit.end], ids[: unit.end]):
                best = unit
        if best is None:
            return None, 0
        if best in self._kept:
            self._kept.move_to_end(best)
        return best, best.end

    def forget_kept(self) -> None:
        """Drop every kept prefix that no unit stands on: the weights have changed, or a call broke off."""
        while idle := [prefix for prefix in self._kept if prefix.refs == 0]:
            for prefix in idle:
                self._drop(prefix)

    def _keep(self, prefix: Prefix) -> bool:
        if self.keep_prefixes == 0 or prefix.computed < prefix.end or prefix.end == prefix.start:
            return False
        if any(below.computed < end for below, end in prefix.ancestors()):
            return False  # an ancestor was given up and not computed again, so the prefix cannot be read
        if self.match(prefix.ids, prefix.end, prefix.key)[1] == prefix.end:
            return False  # the same tokens are kept already, and this call did not use them
        prefix.kept = True
        prefix.ids = np.array(prefix.ids[: prefix.end])  # a copy, so that the rest of the prompt is freed
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
        """Assert that every page is free or has one holder, and that units, cache and counts agree.

        ``alive``: every request that has not ended. With it, prefixes that outlive their readers are found as well.
        """
        held = [page for unit in self._holders for page in unit.pages]
        assert sorted(held + self._free) == list(range(self.num_pages)), "a page is lost, or has two owners"
        if self.slots is not None:
            self.slots.check_integrity(self._holders)
        assert self.requests == sum(map(_is_counted, self._holders)), "requests are miscounted"
        of_requests = sum(len(unit.pages) for unit in self._holders if isinstance(unit, Request))
        assert self.request_pages == of_requests, "pages of requests are miscounted"
        units = units_below([*self._holders, *self._kept, *(alive or ())])
        standing = dict.fromkeys(units, 0)
        for unit in units:
            assert (unit in self._holders) == bool(unit.pages), f"{unit} is listed wrongly among the holders"
            room = unit.start + len(unit.pages) * self.page_size
            assert unit.first_computed <= unit.computed <= max(room, unit.first_computed), f"{unit} overflows"
            if isinstance(unit, Prefix):
                assert unit.computed <= unit.end, f"{unit} is computed beyond its end"
                assert unit.kept == (unit in self._kept), f"{unit} is listed wrongly among the kept prefixes"
                assert not unit.kept or unit.computed == unit.end, f"{unit} is kept and not complete"
            if unit.base is not None:
                standing[unit.base] += 1
                end = unit.first_computed
                assert unit.base.start <= unit.start <= end <= unit.base.readable_end, (
                    f"{unit} reads beyond {unit.base}"
                )
                assert end <= unit.base.read_end, f"{unit} reads more of {unit.base} than its `read_end` says"
            if isinstance(unit, Request) and unit.computed > unit.first_computed:
                for below, end in unit.ancestors():
                    assert below.computed >= end, f"{unit} was computed before {below}"
            if isinstance(unit, Branch):
                assert unit.computed <= unit.length, f"{unit} is computed beyond its end"
        for below, count in standing.items():
            assert below.refs >= count, f"{below} counts fewer units than the {count} that stand on it"
            if isinstance(below, Branch):
                stays = below.in_use
            elif isinstance(below, Prefix):
                stays = below.kept
            else:
                assert below.refs == 0, f"{below} is no unit to stand on"
                continue
            assert alive is None or below.refs == count, f"{below} counts more units than the {count} on it"
            assert alive is None or count or stays, f"{below} has outlived its readers"
