"""Processes of a pool that are forked off one that has imported what they need, see ``support_quick_python``.

What they do from then on is the same. ``started_anew`` starts them as users do.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

from support_quick_python import QuickPython

from hf_batchllm.pool import worker_handle


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
