"""Python's garbage collector stays away from large lists while a call works on them.

Many new objects trigger full collections, each of which walks over every token id of every list that the process holds.
For a large list of prompts that takes seconds, and frees nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

_NEVER = 2**31 - 1  # collections of the younger generations, after which all objects would be looked at


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """For work that makes many objects and no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class FullCollectionsPaused:
    """For a whole call. Young objects are collected, so cycles that hooks and processors make are freed as usual.

    Thresholds that someone sets meanwhile stay.
    """

    def __enter__(self) -> None:
        self._before = gc.get_threshold()
        gc.set_threshold(*self._before[:2], _NEVER)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if gc.get_threshold() == (*self._before[:2], _NEVER):
            gc.set_threshold(*self._before)
