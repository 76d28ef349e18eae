"""What the command tells its user: on stderr, in a line or two."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import BatchLLMError

PROGRAM = "hf-batchllm"


class UsageError(BatchLLMError, ValueError):
    """The command, or a file that it names, cannot be used. Nothing was run."""


class Console:
    """``quiet``: prints errors alone. ``tracebacks``: prints the traceback of each error, too. ``in_our_words`` puts
    warnings and errors of the library into the words of the command."""

    def __init__(
        self,
        quiet: bool = False,
        tracebacks: bool = False,
        in_our_words: Callable[[str], str] = lambda message: message,
    ) -> None:
        self.quiet = quiet
        self._tracebacks = tracebacks
        self._in_our_words = in_our_words

    def error(self, message: str, error: BaseException | None = None) -> None:
        if error is not None and self._tracebacks:
            traceback.print_exception(error, file=sys.stderr)
        self._write(f"{PROGRAM}: error: {self._in_our_words(message)}")

    def warning(self, message: str) -> None:
        if not self.quiet:
            self._write(f"{PROGRAM}: warning: {self._in_our_words(message)}")

    def note(self, message: str) -> None:
        if not self.quiet:
            self._write(f"{PROGRAM}: {message}")

    def plain(self, message: str) -> None:
        if not self.quiet:
            self._write(message)

    @contextmanager
    def warnings_shown(self) -> Iterator[None]:
        """Prints Python's warnings as lines of this command, each once."""
        seen: set[str] = set()

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if str(message) not in seen:
                seen.add(str(message))
                self.warning(str(message))

        with warnings.catch_warnings():
            warnings.showwarning = show
            yield

    def _write(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)


def reason(error: BaseException) -> str:
    """The error in a line or two."""
    if isinstance(error, BatchLLMError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = " ".join(lines[:2])[:400]
    known = isinstance(error, ValueError | OSError | ImportError)
    return message if known and message else f"{type(error).__name__}: {message}" if message else type(error).__name__
