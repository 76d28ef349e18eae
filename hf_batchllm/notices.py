"""Warnings that point at whoever is meant: the line that called into this library."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_PACKAGE = __name__.partition(".")[0]


class Notices:
    """Each kind of warning once. A generator has its own, so a loop of calls does not repeat what was said.

    Python's filter alone would not do: it starts afresh whenever any code touches the filters, and in a notebook for
    every cell.
    """

    def __init__(self) -> None:
        self._given: set[str] = set()

    def __call__(self, kind: str, message: str) -> None:
        if kind not in self._given:
            warn_user(message)
            self._given.add(kind)  # not before: where warnings are errors, it is one every time


def warn_user(message: str) -> None:
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    # By the module's name, as the package lies in several folders. contextlib stands between a `with` and its body.
    name = frame.f_globals.get("__name__") or ""
    return name.partition(".")[0] == _PACKAGE or name == "contextlib"
