"""A stream of results, which an interrupt leaves without a frame of the call: such frames hold the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

from ..errors import GeneratorBusyError
from .tracebacks import without_frames

T = TypeVar("T")


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
