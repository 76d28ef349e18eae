"""What the command tells its user, on stderr and in a line or two; its exit codes, and the signals that end it."""

from __future__ import annotations

import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..errors import BatchLLMError

PROGRAM = "hf-batchllm"
DONE, STOPPED, USAGE, SOME_ERRORS = 0, 1, 2, 3
INTERRUPTED = int(128 + signal.SIGINT)  # as in shells
EXIT_CODES_HELP = """\
exit codes:
  0    all done
  1    stopped by an error; finished results are kept
  2    the command or its files cannot be used; nothing was run
  3    finished, and some lines have errors
  130  interrupted by Ctrl-C, SIGTERM or SIGHUP; finished results are kept
"""
_LONGEST_REASON = 300  # characters


class UsageError(BatchLLMError, ValueError):
    """The command, or a file that it names, cannot be used. Nothing was run."""


class Console:
    """Writes to stderr. ``quiet``: errors alone. ``tracebacks``: each error's traceback, too."""

    def __init__(self, quiet: bool = False, tracebacks: bool = False) -> None:
        self.quiet = quiet
        self._tracebacks = tracebacks

    def error(self, message: str, error: BaseException | None = None) -> None:
        if error is not None and self._tracebacks:
            traceback.print_exception(error, file=sys.stderr)
        print(f"{PROGRAM}: error: {message}", file=sys.stderr, flush=True)

    def warning(self, message: str) -> None:
        self.note(f"warning: {message}")

    def note(self, message: str) -> None:
        self.plain(f"{PROGRAM}: {message}")

    def plain(self, message: str) -> None:
        if not self.quiet:
            print(message, file=sys.stderr, flush=True)

    @contextmanager
    def warnings_shown(self) -> Iterator[None]:
        """Prints Python's warnings as lines of this command, each once."""
        seen: set[str] = set()

        def show(message: Warning | str, *rest: Any, **more: Any) -> None:
            if str(message) not in seen:
                seen.add(str(message))
                self.warning(str(message))

        with warnings.catch_warnings():
            warnings.showwarning = show
            yield


def reason(error: BaseException) -> str:
    """The error in a line: the library's own sentences, or the first lines of another library's."""
    if isinstance(error, BatchLLMError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = [line for line in str(error).splitlines() if line.strip()]
    message = textwrap.shorten(" ".join(lines[:2]), _LONGEST_REASON, placeholder=" ...")
    if message and isinstance(error, ValueError | OSError | ImportError):
        return message
    return ": ".join(filter(None, (type(error).__name__, message)))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP do what Ctrl-C does: the call ends in order, and finished results are kept."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:  # Windows has no SIGHUP
            if signal.getsignal(number) is signal.SIG_DFL:  # under nohup, SIGHUP is ignored and stays so
                before[number] = signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
