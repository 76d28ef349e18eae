"""Ctrl-C while steps run: it is noted, and acted upon in the next layer or at the end of the step.

Python would raise it between any two lines. A second one is raised at once, unless something is being put back. Only
the main thread is interrupted, so only there a handler of ours is installed: that of the user's acts on what is noted.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_here = threading.local()  # ``innermost``: the Interrupts in force; ``held``: how many blocks of ``held_back``


class Interrupts:
    """Those of a call. They are in force from ``begin`` to ``end``, but for the user's turns."""

    def __init__(self) -> None:
        self._came: Any = None  # the frame that the noted interrupt came in
        self._acted = False  # an error is on its way out of the call
        self._users: Any = None  # handler
        self._in_force = False
        self._around: Interrupts | None = None

    def begin(self) -> None:
        if self._in_force or threading.current_thread() is not threading.main_thread():
            return
        users = signal.getsignal(signal.SIGINT)
        if callable(users):  # otherwise Ctrl-C is ignored, or ends the process
            self._users, self._around = users, _innermost()
            self._in_force = True
            _here.innermost = self
            signal.signal(signal.SIGINT, self._note)

    def pause(self) -> None:
        """From here on the user's own handler is in force."""
        if self._in_force:
            if signal.getsignal(signal.SIGINT) == self._note:  # a hook may have set another
                signal.signal(signal.SIGINT, self._users)
            _here.innermost = self._around
            self._in_force = False

    def leave(self) -> None:
        """From here on the call is being left: another interrupt waits until that is done."""
        self._acted = True
        self.begin()  # if it was the user's turn, or no step has run

    def end(self, error: BaseException | None) -> None:
        """The call has been left, with this error. An interrupt that nothing has acted upon is the user's."""
        self.pause()
        frame, self._came = self._came, None
        if frame is not None and not isinstance(error, KeyboardInterrupt):
            self._users(signal.SIGINT, frame)

    def act(self) -> None:
        """Raise a KeyboardInterrupt if one is noted, or whatever the user's handler does."""
        if self._came is not None:
            frame, self._came = self._came, None
            self._acted = True
            self._users(signal.SIGINT, frame)
            self._acted = False

    def _note(self, number: int, frame: Any) -> None:
        if not self._in_force:  # a hook has kept this handler, and put it back later
            self._users(number, frame)
            return
        waits = self._came is not None
        self._came = frame
        if waits and not self._acted and not getattr(_here, "held", 0):
            self.act()


def _innermost() -> Interrupts | None:
    return getattr(_here, "innermost", None)


def act_on_interrupts() -> None:
    """Each layer calls this, and the loop before each step."""
    innermost = _innermost()
    if innermost is not None:
        innermost.act()


@contextmanager
def held_back() -> Iterator[None]:
    """While something is put back nothing interrupts that, once a call's steps run."""
    _here.held = getattr(_here, "held", 0) + 1
    try:
        yield
    finally:
        _here.held -= 1


class _HeldBack(Interrupts):
    def act(self) -> None:
        """Not before the end."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """An interrupt waits for the end of the block, in layers, too. After an error it is the call's around, if any."""
    held = _HeldBack()
    held.begin()
    try:
        yield
    except BaseException:
        came, held._came = held._came, None
        if came is not None and held._around is not None:  # which may survive the error
            held._around._came = came
        raise
    finally:
        held.end(None)


@contextmanager
def users_handler() -> Iterator[None]:
    """While code of the user's runs, their handler is in force."""
    act_on_interrupts()
    ours = _innermost()
    if ours is None:
        yield
        return
    ours.pause()
    try:
        yield
    finally:
        ours.begin()


def _after_a_fork() -> None:
    """A new process has none of the threads whose calls would act on what is noted."""
    handler = signal.getsignal(signal.SIGINT)
    while isinstance(noting := getattr(handler, "__self__", None), Interrupts):
        handler = noting._users
    if handler is not signal.getsignal(signal.SIGINT):
        signal.signal(signal.SIGINT, handler)
        _here.innermost = None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_a_fork)
