"""Processes of a pool that are forked off one that has imported what they need, see ``support_quick_python``.

What they do from then on is the same. ``started_anew`` starts them as users do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from support_quick_python import QuickPython

from hf_batchllm.pool import followers, worker_handle


def quick_workers() -> None:
    """From now on, pools of this process have such workers."""
    worker_handle.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": QuickPython})  # type: ignore[assignment]


@contextlib.contextmanager
def started_anew() -> Iterator[None]:
    """Workers are started as users start them."""
    before, worker_handle.subprocess = worker_handle.subprocess, subprocess
    try:
        yield
    finally:
        worker_handle.subprocess = before


def quick_followers() -> None:
    """In a worker: its followers are forked off it. So they are its children, and end with its session."""
    followers.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _Forked})  # type: ignore[assignment]


class _Forked:
    def __init__(self, command: Sequence[str], **given: Any) -> None:
        self.pid = os.fork()
        if not self.pid:
            try:
                sys.argv[:] = ["-c", *command[command.index("-c") + 2 :]]
                followers.main()
            finally:
                os._exit(1)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
