"""What came of the cases of a check, and what an error in one says: of the kernel, or of what is around it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import torch

BEGUN = "begun"  # what a child says of a case before it runs it
PASSED, WRONG, RAISED, CRASHED, HUNG = "passed", "wrong", "raised an error", "crashed", "hung"
# These say nothing of the kernels: there was no room in memory, or something around them was not as it should be.
NO_ROOM, NOT_TRIED = "no room", "not tried"
UNKNOWN = (NO_ROOM, NOT_TRIED)
START, END = "start", "end"  # what a child does before its first case and after its last one
CANNOT_TELL = 74  # the exit code of a child that cannot write its outcomes
# What PyTorch and CUDA say where other work has the memory.
_NO_ROOM = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_ALLOC_FAILED")
# And where a card is for one process alone, or where Triton cannot build the part that launches kernels.
_NOT_TRIED = ("busy or unavailable", "C compiler", "no CUDA-capable device", "invalid device ordinal")


@dataclass(frozen=True)
class Outcome:
    case: str
    verdict: str
    detail: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.case}: {self.verdict}{f' ({self.detail})' if self.detail else ''}"


def first_failure(outcomes: list[Outcome]) -> Outcome | None:
    """What a kernel failed at, if one did; else what kept a case from being tried."""
    failures = [each for each in outcomes if each.verdict != PASSED]
    return min(failures, key=lambda each: each.verdict in UNKNOWN, default=None)


def verdict_of(error: Exception) -> str:
    if is_others_work(error):
        return NO_ROOM
    around = isinstance(error, (OSError, ImportError, subprocess.CalledProcessError))
    return NOT_TRIED if around or any(words in str(error) for words in _NOT_TRIED) else RAISED


def is_others_work(error: Exception) -> bool:
    """Whether memory was short, which says nothing of the kernel."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in str(error) for words in _NO_ROOM)


def in_a_line(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        command = error.cmd[0] if isinstance(error.cmd, list) and error.cmd else error.cmd
        return f"{command} failed (are Python's headers installed, as in python3-dev?)"
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
