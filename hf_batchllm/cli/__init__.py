"""The command ``hf-batchllm``: ``main`` picks what was asked for. Nothing here imports torch before it is needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..installed_versions import in_words
from .exits import INTERRUPTED, STOPPED, USAGE
from .messages import Console, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; see ``exits``."""
    from .commands import dispatch

    _open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = dispatch(arguments)
        sys.stdout.flush()
        return code
    except UsageError as error:
        Console().error(str(error))
        return USAGE
    except SystemExit as asked:  # --help, --version, and the commands that are handed on
        if isinstance(asked.code, str):
            Console().error(asked.code)
        return asked.code if isinstance(asked.code, int) else 0 if asked.code is None else 1
    except ImportError as error:
        if (words := in_words(error)) is None:
            raise
        Console().error(str(words))
        return USAGE
    except KeyboardInterrupt:  # while modules are loaded
        Console().error("interrupted.")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has closed it, as `head` does
        with open(os.devnull, "wb") as nothing:  # else Python complains when it flushes stdout at its end
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        return STOPPED


def _open_closed_streams() -> None:
    """A daemon may start commands without stdout: a file opened later would get its number, and be printed into."""
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):  # writes to stdout fail
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for the rest of the process)
