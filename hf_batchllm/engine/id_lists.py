"""Token ids as lists of Python's ints, where neighbours begin alike."""

from __future__ import annotations

import numpy as np


class IdLists:
    """Makes a list of each array. The ids that it has in common with one before are the same int objects.

    New objects for all of them would take most of the time of a result, and seven times the memory.
    """

    def __init__(self) -> None:
        self._ids = np.empty(0, dtype=np.int32)
        self._list: list[int] = []

    def of(self, ids: np.ndarray) -> list[int]:  # [tokens]
        most = min(len(ids), len(self._ids))
        same = 0
        if most and ids[0] == self._ids[0]:
            differs = ids[:most] != self._ids[:most]
            same = int(differs.argmax())
            if not differs[same]:
                same = most
        made = self._list[:same]
        made += ids[same:].tolist()
        if 2 * same < len(self._ids) or not same:  # the next ones may rather begin like this one
            self._ids, self._list = ids, made[:]  # a copy, as the user may change the list
        return made
