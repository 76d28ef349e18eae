"""Which pieces of its part a worker has begun, and which it has given up to others."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping


class PieceClaims:
    """Asked by the scheduler, and by the thread that hears of other workers."""

    def __init__(self, piece_of: Mapping[int, int]) -> None:
        """``piece_of``: the piece of each prompt, by the number that its requests have."""
        self._piece_of = piece_of
        self._begun: set[int] = set()
        self._gone: set[int] = set()
        self._lock = threading.Lock()

    @property
    def begun(self) -> frozenset[int]:
        return frozenset(self._begun)

    def take(self, index: int) -> bool:
        piece = self._piece_of[index]
        if piece in self._begun:  # nobody takes it out again
            return True
        with self._lock:
            if piece not in self._gone:
                self._begun.add(piece)
            return piece not in self._gone

    def give_up(self, pieces: Iterable[int]) -> list[int]:
        """Those of the pieces that had not begun: they are not run here."""
        with self._lock:
            given = [piece for piece in pieces if piece not in self._begun and piece not in self._gone]
            self._gone.update(given)
            return given
