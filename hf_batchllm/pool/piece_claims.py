"""Which pieces of its part a worker has begun, and which others have taken over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping


class PieceClaims:
    """Asked by the scheduler, and told by the thread that hears of other workers."""

    def __init__(self, piece_of: Mapping[int, int], tell: Callable[[int], None] = lambda piece: None) -> None:
        """``piece_of``: the piece of each prompt, by the number of its requests. ``tell``: of a piece that begins."""
        self._piece_of = piece_of
        self._tell = tell
        self._begun: set[int] = set()
        self._gone: set[int] = set()
        self._lock = threading.Lock()

    def take(self, index: int) -> bool:
        piece = self._piece_of[index]
        if piece in self._begun:  # nobody takes it out again
            return True
        with self._lock:
            if piece in self._gone:
                return False
            self._begun.add(piece)
        self._tell(piece)
        return True

    def give_up(self, pieces: Iterable[int]) -> None:
        """Those of the pieces that have not begun are not run here."""
        with self._lock:
            self._gone |= set(pieces) - self._begun
