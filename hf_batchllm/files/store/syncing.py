"""When what was written is brought to the disk itself, where a power cut leaves it alone."""

from __future__ import annotations

import queue
import re
import threading

from ...errors import ConfigError
from .paths import sync_file


def seconds_of(policy: str | float) -> float | None:
    """``always`` is 0, ``never`` None, ``5s`` (or a number) 5."""
    if policy == "always":
        return 0.0
    if policy == "never":
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*s?\s*", str(policy))
    if isinstance(policy, bool) or found is None:
        raise ConfigError(f"fsync={policy!r}: it is `always`, `never`, or seconds between two of them, such as `5s`")
    return float(found[1])


_WRITTEN, _STOP = "written", "stop"


class Syncing:
    """In a thread of its own: results may come seldom, and none of them may wait longer than the others for that.

    The two talk through a ``SimpleQueue``, which Ctrl-C cannot leave locked, whatever it interrupts.
    """

    def __init__(self, policy: str | float) -> None:
        self._seconds = seconds_of(policy)
        self._descriptor = -1
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waits = False  # something was written, and the thread has been told
        self._error: OSError | None = None

    def begin(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def written(self) -> None:
        """Something was. OSError: what was written earlier could not be brought to the disk."""
        self._raise()
        if self._seconds is None:
            return
        if self._seconds == 0:
            sync_file(self._descriptor)
            return
        if not self._waits:
            self._waits = True
            self._calls.put(_WRITTEN)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(self._calls, self._seconds), name="hf-batchllm fsync", daemon=True
            )
            self._thread.start()

    def _run(self, calls: queue.SimpleQueue[str], seconds: float) -> None:
        while calls.get() == _WRITTEN:
            try:
                if calls.get(timeout=seconds) == _STOP:
                    return
            except queue.Empty:
                pass
            self._waits = False  # before the sync: what is written during it may not be in it
            try:
                sync_file(self._descriptor)
            except OSError as error:
                self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def end(self) -> None:
        """Before the descriptor is closed, or another takes its place; everything is on the disk afterwards."""
        if self._thread is not None:
            self._calls.put(_STOP)
            if self._thread.ident is not None:  # its start was not interrupted
                self._thread.join()
            self._thread = None
        self._calls, self._waits = queue.SimpleQueue(), False
        self._raise()
        if self._seconds is not None and self._descriptor >= 0:
            sync_file(self._descriptor)
