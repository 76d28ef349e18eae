"""The command ``hf-batchllm``: ``main`` picks what was asked for. Nothing here imports torch before it is needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .exits import INTERRUPTED, STOPPED, USAGE
from .messages import Said, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; see ``exits``."""
    from .commands import dispatch

    _open_what_is_closed()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = dispatch(arguments)
        sys.stdout.flush()
        return code
    except UsageError as error:
        Said().error(str(error))
        return USAGE
    except SystemExit as asked:  # --help, --version, and the commands that are handed on
        if isinstance(asked.code, str):
            Said().error(asked.code)
        return asked.code if isinstance(asked.code, int) else 0 if asked.code is None else 1
    except KeyboardInterrupt:  # while modules are loaded
        Said().error("interrupted.")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read it has seen enough
        with open(os.devnull, "wb") as nothing:  # or Python complains when it flushes it once more
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        return STOPPED


def _open_what_is_closed() -> None:
    """A daemon may start commands without stdout, say: a file opened here would get its number, and be written to."""
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):  # what is written to stdout is an error
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for the rest of the process)
