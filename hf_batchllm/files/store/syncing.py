"""Forces written bytes onto the disk, now and then, so that a power cut cannot take them."""

from __future__ import annotations

import queue
import re
import threading

from ...errors import ConfigError
from .paths import sync_file


def seconds_between_syncs(policy: str | float) -> float | None:
    """``always`` is 0, ``never`` None, ``5s`` (or a number) 5."""
    if policy == "always":
        return 0.0
    if policy == "never":
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*s?\s*", str(policy))
    if isinstance(policy, bool) or found is None:
        raise ConfigError(f"fsync={policy!r}: it must be `always`, `never`, or seconds such as `5s`")
    return float(found[1])


_WRITTEN, _STOP = "written", "stop"


class Syncing:
    """Syncs in a thread of its own, so that a result is synced in time even if no other follows it for long.

    A ``SimpleQueue`` leads to the thread: Ctrl-C cannot leave it locked.
    """

    def __init__(self, policy: str | float) -> None:
        self._seconds = seconds_between_syncs(policy)
        self._descriptor = -1
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._told = False  # the thread knows that something was written
        self._error: OSError | None = None

    def begin(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def written(self) -> None:
        """Call after each write. OSError: an earlier write could not be forced onto the disk."""
        self._raise()
        if self._seconds is None:
            return
        if self._seconds == 0:
            sync_file(self._descriptor)
            return
        if not self._told:
            self._told = True
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
            self._told = False  # before the sync, which may miss what is written during it
            try:
                sync_file(self._descriptor)
            except OSError as error:
                self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def end(self) -> None:
        """Call before the descriptor is closed or replaced; everything is on the disk afterwards."""
        if self._thread is not None:
            self._calls.put(_STOP)
            if self._thread.ident is not None:  # its start was not interrupted
                self._thread.join()
            self._thread = None
        self._calls, self._told = queue.SimpleQueue(), False
        self._raise()
        if self._seconds is not None and self._descriptor >= 0:
            sync_file(self._descriptor)
