"""What is put into dictionaries for a while, such as those of modules, and taken out again."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

ABSENT = object()  # in place of a value: the key is not there
Place = tuple[dict[str, Any], str, Any]  # a dictionary, a key, and what belongs there


class Swap:
    """Puts ``places()`` in. ``restore`` takes out what is in, and may be called again and again."""

    def __init__(self) -> None:
        self._before: list[Place] = []

    def places(self) -> Iterable[Place]:
        """What to put in. Asked for while nothing is."""
        return ()

    def apply(self) -> None:
        self.put(self.places())

    def put(self, places: Iterable[Place]) -> None:
        for own, key, value in places:
            in_place[self] = None
            self._before.append((own, key, own.get(key, ABSENT)))
            _set(own, key, value)

    def restore(self) -> None:
        while self._before:
            _set(*self._before[-1])
            self._before.pop()
        in_place.pop(self, None)

    @contextmanager
    def applied(self) -> Iterator[None]:
        try:
            self.apply()
            yield
        finally:
            self.restore()


def _set(own: dict[str, Any], key: str, value: Any) -> None:
    if value is ABSENT:
        own.pop(key, None)
    else:
        own[key] = value


in_place: dict[Swap, None] = {}  # each that has put something in and has not taken it out
count_lock = threading.RLock()  # held by those that count how many have put the same thing into one place


def _after_a_fork() -> None:
    """A new process has none of the threads that would put back what they have swapped."""
    count_lock._at_fork_reinit()  # type: ignore[attr-defined]
    for swap in reversed(list(in_place)):  # where one stands upon another
        swap.restore()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_a_fork)
