"""Ctrl-C that waits."""

from __future__ import annotations

import signal
import threading
from typing import Any


class HeldInterrupts:
    """Interrupts, kept in ``came`` while they are held back."""

    def __init__(self) -> None:
        self.came: list[Any] = []
        self._before: Any = None  # the owner's handler
        self._held_back = False

    def hold_back(self) -> None:
        if threading.current_thread() is threading.main_thread():  # no other thread is interrupted
            self._before = signal.signal(signal.SIGINT, lambda _, frame: self.came.append(frame))
            self._held_back = True

    def let_through(self, deliver: bool = True) -> None:
        if not self._held_back:
            return
        self._held_back = False
        signal.signal(signal.SIGINT, self._before)
        if deliver and self.came and callable(self._before):
            self._before(signal.SIGINT, self.came.pop())
