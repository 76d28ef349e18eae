"""No full garbage collections while a call runs.

A call makes many objects and hardly any cycles. Python answers many new objects with full collections, each of which
walks over every token id of every list that the process holds: seconds for a large list of prompts, with nothing to
free. Young objects are still collected, so cycles that hooks and processors make in each step are freed as usual.
"""

from __future__ import annotations

import gc
from types import TracebackType

_NEVER = 2**31 - 1  # collections of the younger generations, after which all objects would be looked at


class FullCollectionsPaused:
    """While the block runs, and only if nobody in it sets other thresholds."""

    def __enter__(self) -> None:
        self._before = gc.get_threshold()
        gc.set_threshold(*self._before[:2], _NEVER)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if gc.get_threshold() == (*self._before[:2], _NEVER):
            gc.set_threshold(*self._before)
