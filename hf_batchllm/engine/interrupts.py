"""One call runs at a time; and a stream, which an interrupt leaves without a frame of the call.

An interrupt holds the frames that it came through, and with them the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ..errors import GeneratorBusyError
from .call import Call

STILL_RUNNING = "a call is running already, or a stream is still open: let it end (a stream also by its close())"

T = TypeVar("T")


class Turns:
    def __init__(self) -> None:
        self.running = False

    @contextmanager
    def take(self, make: Callable[[], Call]) -> Iterator[Call]:
        """The call that is made, while no other one runs."""
        if self.running:
            raise GeneratorBusyError(f"{STILL_RUNNING}. One call at a time")
        try:
            self.running = True  # no other thread comes between the test above and this
            with make() as call:
                yield call
        finally:
            self.running = False


class Stream(Iterator[T]):
    """A generator that begins anew when it is asked again after it was refused, as another call was running."""

    def __init__(self, begin: Callable[[], Generator[T, None, None]]) -> None:
        self._begin = begin
        self._generator = begin()
        self._has_begun = False

    def __next__(self) -> T:
        try:
            result = next(self._generator)
            self._has_begun = True
            return result
        except KeyboardInterrupt as interrupt:
            kept = without_frames(interrupt)
        except GeneratorBusyError:
            if not self._has_begun:
                self._generator = self._begin()
            raise
        raise kept

    def close(self) -> None:
        self._generator.close()

    def throw(self, *error: Any) -> T:
        return self._generator.throw(*error)


def without_frames(interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
    """Without those of the call, and without errors that hold them."""
    interrupt.__context__ = interrupt.__cause__ = None
    return interrupt.with_traceback(None)
