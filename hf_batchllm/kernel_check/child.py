"""Runs the cases of a group in a process of its own, which alone survives a kernel that aborts, hangs or touches
memory that is not its own: ``python -m ...child FILE GROUP DEVICE CARD``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import IO

import torch

from . import attention_cases, layer_cases, sampling_cases
from .comparing import Cases, Where, Wrong, card_of
from .outcomes import BEGUN, CANNOT_TELL, END, NO_ROOM, NOT_TRIED, PASSED, START, WRONG, Outcome, in_a_line, verdict_of

# The groups are checked one by one: a model without experts does not wait for the experts' kernels.
GROUPS: dict[str, Callable[[Where], Cases]] = {
    "attention": attention_cases.attention,
    "layers": layer_cases.layers,
    "sampling": sampling_cases.sampling,
    "experts": layer_cases.experts,
    "states": layer_cases.states,
    "parts": attention_cases.parts,
}


def main(to: IO[str], group: str, device: str, card: str, *done: str) -> None:
    """Write an outcome, as a line of JSON, before and after each case that is not ``done``."""

    def say(outcome: Outcome) -> None:
        print(json.dumps(astuple(outcome)), file=to, flush=True)

    try:
        where = Where(torch.device(device))
        if card_of(where.device) != card:
            changed = "has CUDA_VISIBLE_DEVICES been changed since CUDA began?"
            raise OSError(f"a new process sees another card there, {card_of(where.device)} ({changed})")
        if where.device.type == "cuda":
            torch.cuda.set_device(where.device)
            torch.zeros(1, dtype=torch.float32, device=where.device)
        cases = GROUPS[group](where)
    except Exception as error:
        say(Outcome(START, NO_ROOM if verdict_of(error) == NO_ROOM else NOT_TRIED, in_a_line(error)))
        return
    for name, case in cases.items():
        if name not in done:
            say(Outcome(name, BEGUN))
            began = time.perf_counter()
            say(Outcome(name, *_tried(case, where), time.perf_counter() - began))
    say(Outcome(END, PASSED))  # without it an end is not taken for a good one


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


def _end_with_the_parent(path: Path) -> None:
    """A kernel that hangs would keep the card for ever, where the process is gone that was to stop it."""
    with contextlib.suppress(OSError):
        while os.read(0, 64):
            pass
        with contextlib.suppress(OSError):
            for file in (path, path.with_name("said")):
                file.unlink()
            path.parent.rmdir()
        os._exit(1)


if __name__ == "__main__":
    path, *given = sys.argv[1:]
    threading.Thread(target=_end_with_the_parent, args=[Path(path)], daemon=True).start()
    try:
        with open(path, "a", encoding="utf-8") as file:
            main(file, *given)
    except OSError:  # the disk is full, say
        os._exit(CANNOT_TELL)
