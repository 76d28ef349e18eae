"""StateSlots: which unit has which slot for the state of its layers. The tensors themselves are StateStorage's."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from .requests_and_prefixes import NO_SLOT, Unit


class StateSlots:
    """A unit has a slot for as long as it has pages: the state behind the last of its tokens that were computed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.most = 0  # that were taken at the same time
        self._free = list(range(count))  # a heap

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def taken(self) -> int:
        return self.count - len(self._free)

    def take(self, unit: Unit) -> None:
        assert unit.slot == NO_SLOT
        unit.slot = heapq.heappop(self._free)
        self.most = max(self.most, self.taken)

    def give_back(self, unit: Unit) -> None:
        assert unit.slot != NO_SLOT
        heapq.heappush(self._free, unit.slot)
        unit.slot = NO_SLOT

    def grow(self, count: int) -> None:
        for slot in range(self.count, count):
            heapq.heappush(self._free, slot)
        self.count = count

    def compact(self, holders: Iterable[Unit]) -> list[int]:
        """Shrink to the slots of ``holders``, numbered anew. Returns the old number of each of them."""
        before = [unit.slot for unit in holders]
        for slot, unit in enumerate(holders):
            unit.slot = slot
        self._free, self.count = [], len(before)
        return before

    def check_integrity(self, holders: Iterable[Unit]) -> None:
        held = [unit.slot for unit in holders]
        assert sorted(held + self._free) == list(range(self.count)), "a slot is lost, or has two owners"
