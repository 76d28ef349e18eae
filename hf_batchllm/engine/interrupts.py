"""Ctrl-C leaves nothing of a call behind, and the generator ready for the next one. One call runs at a time.

Ctrl-C may come between any two lines, those that clean up included. So a call is left twice: as a context, and by
``Turns.end``, which finds out whether something is still to be done. The interrupt itself holds the frames that it came
through, and with them the KV cache: it goes on only where these frames have been left. An interrupt within the
``__enter__`` of ``torch.no_grad`` leaves gradients off, so the mode of before is set again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from ..errors import GeneratorBusyError
from .call import Call

STILL_RUNNING = "a call is running already, or a stream is still open: let it end (a stream also by its close())"

T = TypeVar("T")


@dataclass
class Turn:
    call: Call | None = None


class Turns:
    def __init__(self) -> None:
        self.running: Turn | None = None

    @contextmanager
    def take(self, turn: Turn, make: Callable[[], Call]) -> Iterator[Call]:
        """The call of ``turn``, made by ``make``, while no other one runs."""
        if self.running is not None:
            raise GeneratorBusyError(f"{STILL_RUNNING}. One call at a time")
        try:
            # A plain attribute: an interrupt between acquiring a lock and noting that could leave it locked. Neither an
            # interrupt nor another thread comes between the test above and this.
            self.running = turn
            turn.call = make()
            with turn.call:
                yield turn.call
        finally:
            self.end(turn)

    def end(self, turn: Turn | None) -> None:
        """After a call; and once more after an interrupt, which may have come in the way of the first time."""
        if turn is None or self.running is not turn:
            return
        try:
            if turn.call is not None:
                turn.call.make_sure()
        finally:
            self.running = None

    def run(
        self, body: Callable[[Turn], T], failed: Callable[[BaseException], None] | None = None
    ) -> tuple[T | None, KeyboardInterrupt | None]:
        """What ``body`` gives, or the interrupt that broke it off, without the frames that it came through.

        ``failed`` is told of any other error, which then goes on as it is.
        """
        turn, grad_mode = None, torch.is_grad_enabled()
        try:
            turn = Turn()
            return body(turn), None
        except KeyboardInterrupt as interrupt:
            torch.set_grad_enabled(grad_mode)
            self.end(turn)
            kept = _bare(interrupt)
        except BaseException as error:
            if failed is not None:
                failed(error)
            raise
        return None, kept

    def stream(self, body: Callable[[Turn], Iterator[T]]) -> Stream[T]:
        return Stream(partial(self._streamed, body))

    def _streamed(self, body: Callable[[Turn], Iterator[T]]) -> Generator[T, None, None]:
        """What ``body`` yields. An interrupt goes on as it is, without the frames that it came through."""
        turn = None
        try:
            turn = Turn()
            yield from body(turn)
            return
        except KeyboardInterrupt as interrupt:
            self.end(turn)
            kept = _bare(interrupt)
        turn = None
        raise kept


class Stream(Iterator[T]):
    """A generator that begins anew when it is asked again after it was refused, as another call was running."""

    def __init__(self, begin: Callable[[], Generator[T, None, None]]) -> None:
        self._begin = begin
        self._generator = begin()
        self._has_begun = False

    def __next__(self) -> T:
        grad_mode = torch.is_grad_enabled()
        try:
            result = next(self._generator)
        except KeyboardInterrupt as interrupt:
            torch.set_grad_enabled(grad_mode)
            raise interrupt.with_traceback(None) from None  # without a frame of the generator
        except GeneratorBusyError:
            if not self._has_begun:
                self._generator = self._begin()
            raise
        self._has_begun = True
        return result

    def close(self) -> None:
        self._generator.close()

    def throw(self, *error: Any) -> T:
        return self._generator.throw(*error)


def _bare(interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
    """Without the frames of the call, and without errors that hold them."""
    interrupt.__context__ = interrupt.__cause__ = None
    return interrupt.with_traceback(None)
