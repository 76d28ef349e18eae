"""What an error in a check says: of the kernel, or of what is around it."""

from __future__ import annotations

import subprocess

import torch

from .outcomes import NO_ROOM, NOT_TRIED, RAISED

# What PyTorch and CUDA say where other work has the memory.
_NO_ROOM = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_ALLOC_FAILED")
# And where a card is for one process alone, or where Triton cannot build the part that launches kernels.
_NOT_TRIED = ("busy or unavailable", "C compiler", "no CUDA-capable device", "invalid device ordinal")


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
