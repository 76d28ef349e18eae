"""Warnings that point at the user's own line: the one that called into this library."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from .wording import in_ranges

_MOST_PLACES = 8  # named in a warning; the rest are counted
_PACKAGE = __name__.partition(".")[0]


class Notices:
    """Gives each kind of warning once. A generator has its own, so a loop of calls does not repeat a warning.

    Python's own filter is not enough: it forgets whenever any code touches the filters, and in a notebook with every
    cell.
    """

    def __init__(self) -> None:
        self._given: set[str] = set()
        self.names: Sequence[str] | None = None  # of the prompts

    @contextmanager
    def naming(self, names: Sequence[str] | None) -> Iterator[None]:
        """Within the block prompts have names of their own, such as "line 17": they are the lines of a file."""
        before, self.names = self.names, names
        try:
            yield
        finally:
            self.names = before

    def places(self, indices: Sequence[int], what: str = "prompt") -> str:
        """``prompt 3``, ``prompts 0-2, 7``, or by the names of the prompts. ``what``: the noun for one."""
        if self.names is None:
            return f"{what}{'s' if len(indices) > 1 else ''} {in_ranges(indices, _MOST_PLACES)}"
        hidden = len(indices) - _MOST_PLACES
        named = ", ".join(self.names[index] for index in indices[:_MOST_PLACES])
        return f"{named} and {hidden:,} more" if hidden > 0 else named

    def was_given(self, kind: str) -> bool:
        return kind in self._given

    def of_prompts(self, kind: str, message: str) -> None:
        """For a warning that names prompts: the prompts of the next call are others, and have a warning of their own.

        Where prompts have names, they are parts of one long list: it has one warning.
        """
        self(kind if self.names is not None else f"{kind}: {message}", message)

    def __call__(self, kind: str, message: str) -> None:
        if kind not in self._given:
            warn_user(message)
            self._given.add(kind)  # after the warning: where warnings are errors, each call must raise it


def warn_user(message: str) -> None:
    """Warn at the line that called the outermost frame of this library; frames of a model may lie further in."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    level = max(at for at, each in enumerate(frames) if _is_ours(each)) + 1
    while level < len(frames) and _stands_between(frames[level]):
        level += 1
    last = len(frames) - 1
    frames.clear()  # it holds this frame, too: the circle would keep all frames, and their tensors, alive
    warnings.warn(message, UserWarning, stacklevel=min(level, last) + 1)


def _is_ours(frame: FrameType) -> bool:
    # By the module's name, not by its path: the package lies in several folders.
    return _module(frame).partition(".")[0] == _PACKAGE


def _stands_between(frame: FrameType) -> bool:
    """Whether the frame is not the user's own: contextlib's, behind a ``with``, or a pipeline's."""
    module = _module(frame)
    return module == "contextlib" or f"{module}.".startswith("transformers.pipelines.")


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""
