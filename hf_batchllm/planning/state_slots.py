"""StateSlots: which unit has which slot for the state of its layers. The tensors themselves are StateStorage's."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from .requests_and_prefixes import NO_SLOT, Branch, Unit


class StateSlots:
    """A unit has a slot for as long as it has pages: the state behind the last of its tokens that were computed.

    But for a beam that is no longer in use: others read its pages, nobody goes on from its state.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.most = 0  # that were taken at the same time
        self._free = list(range(count))  # a heap
        self._copies: dict[int, int] = {}  # slot -> the slot whose state it has to be given before the next step

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def taken(self) -> int:
        return self.count - len(self._free)

    def take(self, unit: Unit) -> None:
        assert unit.slot == NO_SLOT
        unit.slot = heapq.heappop(self._free)
        if isinstance(unit, Branch) and unit.parted_from is not None:
            assert unit.parted_from.slot != NO_SLOT
            self._copies[unit.slot] = unit.parted_from.slot
        self.most = max(self.most, self.taken)

    def give_back(self, unit: Unit) -> None:
        assert unit.slot != NO_SLOT
        self._copies.pop(unit.slot, None)
        heapq.heappush(self._free, unit.slot)
        unit.slot = NO_SLOT

    def copies(self) -> list[tuple[int, int]]:
        """(source, target) of the copies to make before the next step. They are handed out once."""
        pairs = [(source, target) for target, source in self._copies.items()]
        self._copies.clear()
        return pairs

    def grow(self, count: int) -> None:
        for slot in range(self.count, count):
            heapq.heappush(self._free, slot)
        self.count = count

    def compact(self, holders: Iterable[Unit]) -> list[int]:
        """Shrink to the slots of ``holders``, numbered anew. Returns the old number of each of them."""
        holding = [unit for unit in holders if unit.slot != NO_SLOT]
        before = [unit.slot for unit in holding]
        for slot, unit in enumerate(holding):
            unit.slot = slot
        self._copies.clear()
        self._free, self.count = [], len(before)
        return before

    def check_integrity(self, holders: Iterable[Unit]) -> None:
        held: list[int] = []
        for unit in holders:
            if isinstance(unit, Branch) and not unit.in_use:
                assert unit.slot == NO_SLOT, f"{unit} keeps a state that nobody goes on from"
            else:
                held.append(unit.slot)
        assert sorted(held + self._free) == list(range(self.count)), "a slot is lost, or has two owners"
        assert self._copies.keys() <= set(held), "a state is to be copied for nobody"
