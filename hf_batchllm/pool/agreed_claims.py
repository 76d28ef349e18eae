"""The claims of a worker that has its model together with other processes: all of them begin the same pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .piece_claims import PieceClaims


class AgreedClaims(PieceClaims):
    """What other workers ask for is given up where all ranks meet before a step, by all of them.

    say: on the first rank, told of what is given up for each request.
    """

    def __init__(self, piece_of: Mapping[int, int], say: Callable[[list[int]], None] = lambda pieces: None) -> None:
        super().__init__(piece_of)
        self._say = say
        self._asked: list[Sequence[int]] = []
        self._broken_off = self._over = False

    def ask(self, pieces: Sequence[int]) -> bool:
        """Another worker asks for these pieces. Whether ``say`` will be told."""
        with self._lock:
            if not self._over:
                self._asked.append(pieces)
            return not self._over

    def break_off(self) -> None:
        """All ranks are to stop."""
        self._broken_off = True

    @property
    def waits(self) -> bool:
        """Whether there is something for ``agree``."""
        return bool(self._asked) or self._broken_off

    def agree(self, of_first: Callable[[Any], Any]) -> bool:
        """On all ranks, which ``of_first`` gives what the first one has. Whether they are to stop."""
        asked, stops = of_first((list(self._asked), self._broken_off))
        with self._lock:
            del self._asked[: len(asked)]  # now: after an error, ``end`` answers
        for pieces in asked:
            self._say(self.give_up(pieces))
        return bool(stops)

    def end(self) -> None:
        """The part is over."""
        with self._lock:
            asked, self._asked, self._over = self._asked, [], True
        for _ in asked:
            self._say([])
