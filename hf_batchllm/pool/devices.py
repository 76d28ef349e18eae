"""Which devices the workers of a pool run on, and the environment that shows a worker its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..wording import is_whole, shown

_WHAT = '`gpus` is a number of GPUs, or a list of their numbers (a CPU process is "cpu")'


@dataclass(frozen=True)
class WorkerDevice:
    """``index``: of the GPU as this process counts; None for the CPU."""

    index: int | None

    @property
    def name(self) -> str:
        """For people."""
        return "the CPU" if self.index is None else f"GPU {self.index}"

    @property
    def device(self) -> str:
        """For torch, in a worker that sees no other GPU."""
        return "cpu" if self.index is None else "cuda"

    def environment(self, workers: int) -> dict[str, str]:
        """``workers``: how many there are on this machine, which share its cores."""
        made = {}
        if "OMP_NUM_THREADS" not in os.environ:
            made["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // workers))
        if self.index is None:
            return made | {"CUDA_VISIBLE_DEVICES": ""}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        named = visible.split(",")[self.index].strip() if visible else str(self.index)
        return made | {"CUDA_VISIBLE_DEVICES": named}


def worker_devices(gpus: Any) -> list[WorkerDevice]:
    """``gpus``: how many, or which; None: all that there are."""
    if isinstance(gpus, str | bool):
        raise ConfigError(f"{_WHAT}, not {shown(gpus)}")
    if gpus is None or is_whole(gpus):
        there = _gpus_there()
        if gpus is None:
            gpus = there
            if not there:
                raise ConfigError('torch finds no GPU here. `gpus=["cpu", "cpu"]` runs two processes on the CPU')
        elif gpus < 1:
            raise ConfigError(f"{_WHAT}, 1 or more, not {gpus}")
        elif gpus > there:
            raise ConfigError(f"`gpus` is {gpus}, and torch finds {there} here")
        return [WorkerDevice(index) for index in range(gpus)]
    if not isinstance(gpus, Sequence) or not gpus:
        raise ConfigError(f"{_WHAT}, not {shown(gpus)}")
    return [_one(each) for each in gpus]


def _one(given: Any) -> WorkerDevice:
    text = str(given)
    if text == "cpu":
        return WorkerDevice(None)
    number = text.removeprefix("cuda:")
    if not number.isdecimal() or isinstance(given, bool):
        raise ConfigError(f"{_WHAT}, and {shown(given)} is none")
    there = _gpus_there()
    if int(number) >= there:
        raise ConfigError(f"`gpus` has {shown(given)}, and torch finds {there or 'no'} GPU{'s' * (there != 1)} here")
    return WorkerDevice(int(number))


def _gpus_there() -> int:
    """Counted without beginning to use them: the memory that this takes on each GPU is the workers'."""
    import torch

    return torch.cuda.device_count()


def gpus_from(text: str) -> int | list[str]:
    """From a command line: a number of GPUs, or a list of their numbers."""
    names = [each.strip() for each in text.split(",") if each.strip()]
    return int(names[0]) if len(names) == 1 and "," not in text and names[0].isdecimal() else names
