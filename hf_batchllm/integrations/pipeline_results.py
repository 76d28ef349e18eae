"""The results of a pipeline for inputs that are not a list: computed as they are read."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sized
from typing import Any


class ResultIterator(Iterator[Any]):
    """Results in the order of the inputs. Work begins when the first result is asked for.

    ``begin`` starts the work. As in transformers, each ``for`` loop starts anew if the inputs have a length.
    ``close()`` ends the work early.
    """

    def __init__(self, begin: Callable[[], Generator[Any, None, None]], inputs: Any) -> None:
        self._begin = begin
        self._length = len(inputs) if isinstance(inputs, Sized) else None
        self._running: Generator[Any, None, None] | None = None
        self._over: Exception | None = None  # raised instead of further results

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("these results have no length: their inputs have none")
        return self._length

    def __iter__(self) -> ResultIterator:
        if self._length is not None:
            self.close()
            self._over = None
        return self

    def __next__(self) -> Any:
        if self._over is not None:
            raise self._over
        if self._running is None:
            self._running = self._begin()
        try:
            return next(self._running)
        except BaseException:  # an error ends the results, too
            self.close()
            raise

    def close(self) -> None:
        running, self._running, self._over = self._running, None, StopIteration()
        if running is not None:
            running.close()

    def break_off(self, error: Exception) -> None:
        """End work that has begun; reading further results raises the error."""
        if self._running is not None:
            self.close()
            self._over = error
