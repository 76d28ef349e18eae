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

    def was_given(self, kind: str) -> bool:
        return kind in self._given

    def __call__(self, kind: str, message: str) -> None:
        if kind not in self._given:
            warn_user(message)
            self._given.add(kind)  # not before: where warnings are errors, it is one every time


def warn_user(message: str) -> None:
    # From the outermost of our frames: between it and this one there may be a model's.
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    level = max(at for at, each in enumerate(frames) if _is_ours(each)) + 1
    while level < len(frames) and _stands_between(frames[level]):
        level += 1
    last = len(frames) - 1
    frames.clear()  # this one is among them: together they would stay, with whatever tensors they hold
    warnings.warn(message, UserWarning, stacklevel=min(level, last) + 1)


def _is_ours(frame: FrameType) -> bool:
    # By the module's name, as the package lies in several folders.
    return _module(frame).partition(".")[0] == _PACKAGE


def _stands_between(frame: FrameType) -> bool:
    """contextlib does, between a ``with`` and its body, and a pipeline, which calls what was put into it."""
    module = _module(frame)
    return module == "contextlib" or f"{module}.".startswith("transformers.pipelines.")


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""
