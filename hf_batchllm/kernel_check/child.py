"""Runs the cases of a group, and writes a line of JSON before and after each: ``python -m ...child GROUP DEVICE CARD``.

It runs in a process of its own, which alone survives a kernel that aborts, hangs or touches memory that is not its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

import torch

from .comparing import Where, Wrong
from .errors_in_a_check import in_a_line, is_others_work, verdict_of
from .groups import GROUPS
from .outcomes import NO_ROOM, NOT_TRIED, PASSED, WRONG
from .which_card import device_with


def main(arguments: list[str], to: IO[str]) -> None:
    """``arguments``: the group, the device, its card's mark, and the names of cases that are passed over."""
    group, device, mark, *done = arguments

    def say(**line: object) -> None:
        print(json.dumps(line), file=to, flush=True)

    try:
        where = Where(device_with(mark, torch.device(device)))
        if where.device.type == "cuda":
            torch.cuda.set_device(where.device)
            torch.zeros(1, dtype=torch.float32, device=where.device)
        cases = GROUPS[group](where)
    except Exception as error:
        verdict = NO_ROOM if is_others_work(error) else NOT_TRIED
        say(case="start", verdict=verdict, detail=in_a_line(error))
        return
    for name, case in cases.items():
        if name not in done:
            say(begins=name)
            began = time.perf_counter()
            verdict, detail = _tried(case, where)
            say(case=name, verdict=verdict, detail=detail, seconds=time.perf_counter() - began)
    say(ends=True)  # without it an end is not taken for a good one


def _tried(case: Callable[[], None], where: Where) -> tuple[str, str]:
    try:
        case()
        if where.device.type == "cuda":
            torch.cuda.synchronize()
    except Wrong as error:
        return WRONG, str(error)
    except Exception as error:
        return verdict_of(error), in_a_line(error)
    return PASSED, ""


def _end_with_the_parent() -> None:
    """A kernel that hangs would keep the card for ever, where the process is gone that was to stop it."""
    with contextlib.suppress(OSError):
        while os.read(0, 64):
            pass
        os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may write between the lines, neither in Python nor in C
    main(sys.argv[1:], lines)
