"""When what was written is brought to the disk itself, where a power cut leaves it alone."""

from __future__ import annotations

import re
import threading
import time

from ..errors import ConfigError
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


class Syncing:
    """In a thread of its own: results may come seldom, and none of them may wait longer than the others for that."""

    def __init__(self, policy: str | float) -> None:
        self._seconds = seconds_of(policy)
        self._descriptor = -1
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._waiting_since: float | None = None  # written, and not yet on the disk
        self._stop = False
        self._error: OSError | None = None

    def begin(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def written(self) -> None:
        """Something was. OSError: what was written earlier could not be brought to the disk."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._seconds is None:
            return
        if self._seconds == 0:
            sync_file(self._descriptor)
            return
        with self._wake:
            if self._waiting_since is None:
                self._waiting_since = time.monotonic()
                self._wake.notify()
        if self._thread is None:
            self._stop = False
            self._thread = threading.Thread(target=self._run, name="hf-batchllm fsync", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._stop and self._waiting_since is None:
                    self._wake.wait()
                while not self._stop and (left := self._waiting_since + self._seconds - time.monotonic()) > 0:
                    self._wake.wait(left)
                if self._stop:
                    return
                self._waiting_since = None
            try:
                sync_file(self._descriptor)
            except OSError as error:
                self._error = error

    def end(self) -> None:
        """Before the descriptor is closed, or another takes its place; everything is on the disk afterwards."""
        if self._thread is not None:
            with self._wake:
                self._stop = True
                self._wake.notify()
            self._thread.join()
            self._thread = None
        self._waiting_since = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._seconds is not None and self._descriptor >= 0:
            sync_file(self._descriptor)
