"""The exit codes of the command, and how signals end it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

DONE, STOPPED, USAGE, SOME_ERRORS = 0, 1, 2, 3
_BY_SIGNAL = 128  # plus the signal's number, as in shells
INTERRUPTED = int(_BY_SIGNAL + signal.SIGINT)

EXIT_CODES_HELP = """\
exit codes:
  0    all done
  1    stopped by an error; finished results are kept
  2    the command or its files cannot be used; nothing was run
  3    finished, and some lines have errors
  130  interrupted by Ctrl-C (143 by SIGTERM, 129 by SIGHUP); finished results
       are kept
"""


class Interrupts:
    """``code``: the exit code after an interrupt."""

    def __init__(self) -> None:
        self.code = INTERRUPTED

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.code = _BY_SIGNAL + number
        raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """SIGTERM and SIGHUP do what Ctrl-C does: the call ends in order, and finished results are kept."""
    interrupts = Interrupts()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            # Under nohup, SIGHUP is ignored and stays so.
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, interrupts)
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
