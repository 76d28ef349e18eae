"""An error that speaks for itself comes without the frames of this library: in notebooks, scripts and tests alike.

An error about an argument says which one and why; the way down to the line that found it says nothing more. Frames of
the user's own code (a hook, a processor) are never left out. ``python -X dev`` leaves out nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

from ..errors import BatchLLMError, GenerationInterrupted

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = __name__.partition(".")[0]
_CHECKS = f"{_PACKAGE}.inputs."  # whose ValueErrors are transformers' about an option
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def with_short_tracebacks(function: Function) -> Function:
    """For the functions that users call."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # for IPython and pytest: this frame says nothing either
        try:
            return function(*args, **kwargs)
        except (BatchLLMError, GenerationInterrupted, ValueError) as error:
            shorten(error)
            raise

    checked.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return cast(Function, checked)


def shorten(error: BaseException) -> None:
    """Leave out the frames below the one that catches the error, and those of the errors that led to it."""
    if sys.flags.dev_mode:
        return
    caught = error.__traceback__
    if caught is None or _shows_own_code(caught.tb_next) or not _speaks_for_itself(error, caught.tb_next):
        return
    caught.tb_next = None
    for cause in (error.__cause__, error.__context__):
        if cause is not None and not _shows_own_code(cause.__traceback__):
            cause.__traceback__ = None


def _speaks_for_itself(error: BaseException, below: TracebackType | None) -> bool:
    if isinstance(error, BatchLLMError | GenerationInterrupted):
        return True
    return any(_module(frame).startswith(_CHECKS) for frame, _ in traceback.walk_tb(below))


def _shows_own_code(below: TracebackType | None) -> bool:
    """Whether a frame is the user's own: neither this library's nor an installed one's."""
    for frame, _ in traceback.walk_tb(below):
        if _module(frame).partition(".")[0] != _PACKAGE and not frame.f_code.co_filename.startswith(_LIBRARIES):
            return True
    return False


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__"))  # in generated code it may be anything
