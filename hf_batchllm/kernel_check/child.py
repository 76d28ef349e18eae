"""Runs the cases of a group, and writes a line of JSON before and after each: ``python -m ...child GROUP DEVICE``.

It runs in a process of its own, which alone survives a kernel that aborts, hangs or touches memory that is not its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import IO

import torch

from .comparing import Where, Wrong
from .groups import GROUPS
from .outcomes import NO_ROOM, PASSED, RAISED, WRONG

# What PyTorch and CUDA say where other work has the memory, or the whole card.
_OTHERS_WORK = ("out of memory", "busy or unavailable")


def main(arguments: list[str], to: IO[str]) -> None:
    """``arguments``: the group, the device, and the names of cases that are passed over."""
    group, device, *done = arguments

    def say(**line: object) -> None:
        print(json.dumps(line), file=to, flush=True)

    try:
        where = Where(torch.device(device))
        if where.device.type == "cuda":
            torch.cuda.set_device(where.device)
            torch.zeros(1, dtype=torch.float32, device=where.device)
        cases = GROUPS[group](where)
    except Exception as error:
        say(case="start", verdict=NO_ROOM if _is_others_work(error) else RAISED, detail=_in_a_line(error))
        return
    for name, case in cases.items():
        if name not in done:
            say(begins=name)
            began = time.perf_counter()
            verdict, detail = _tried(case, where)
            say(case=name, verdict=verdict, detail=detail, seconds=time.perf_counter() - began)
    say(begins="")  # so that an end without a word is not taken for a good one


def _tried(case: Callable[[], None], where: Where) -> tuple[str, str]:
    try:
        case()
        if where.device.type == "cuda":
            torch.cuda.synchronize()
    except Wrong as error:
        return WRONG, str(error)
    except Exception as error:
        return NO_ROOM if _is_others_work(error) else RAISED, _in_a_line(error)
    return PASSED, ""


def _is_others_work(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _OTHERS_WORK)


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may write between the lines, neither in Python nor in C
    main(sys.argv[1:], lines)
