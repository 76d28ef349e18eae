"""Token ids as lists of Python's ints, where neighbours begin alike."""

from __future__ import annotations

import numpy as np

from ..inputs.token_ids import bytes_of


class IdLists:
    """Makes a list of each array. The ids that it has in common with one before are the same int objects.

    New objects for all of them would take most of the time of a result, and seven times the memory.
    """

    def __init__(self) -> None:
        self._ids = np.empty(0, dtype=np.int32)
        self._list: list[int] = []
        self._head: list[int] = []  # with which the latest ones began, to be looked at first: bytes compare fast
        self._head_bytes = b""

    def of(self, ids: np.ndarray) -> list[int]:  # int32 [tokens]
        count = len(self._head)
        if 2 * count >= len(ids) and bytes_of(ids).startswith(self._head_bytes):
            return [*self._head, *ids[count:].tolist()]
        most = min(len(ids), len(self._ids))
        same = 0
        if most and ids[0] == self._ids[0]:
            differs = ids[:most] != self._ids[:most]
            same = int(differs.argmax())
            if not differs[same]:
                same = most
        made = self._list[:same]
        made += ids[same:].tolist()
        self._head, self._head_bytes = made[:same], ids[:same].tobytes()
        if 2 * same < len(self._ids) or not same:  # the next ones may rather begin like this one
            self._ids, self._list = ids, made[:]  # a copy, as the user may change the list
        return made
