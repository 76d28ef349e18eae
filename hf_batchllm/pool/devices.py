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
    """``index``: of the GPU as this process counts; None for the CPU.

    others: those of further processes, which have the model together with the worker.
    """

    index: int | None
    others: tuple[int, ...] = ()
    processes: int = 1

    @property
    def name(self) -> str:
        """For people."""
        if self.index is None:
            return "the CPU"
        *before, last = map(str, (self.index, *self.others))
        return f"GPUs {', '.join(before)} and {last}" if before else f"GPU {last}"

    @property
    def device(self) -> str:
        """For torch, in a worker that sees no other GPU."""
        return "cpu" if self.index is None else "cuda"

    def environment(self, processes: int) -> dict[str, str]:
        """``processes``: how many there are on this machine, which share its cores."""
        made = {}
        if "OMP_NUM_THREADS" not in os.environ:
            made["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
        if self.index is None:
            return made | {"CUDA_VISIBLE_DEVICES": ""}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        known = visible.split(",") if visible else None
        named = [str(index) if known is None else known[index].strip() for index in (self.index, *self.others)]
        return made | {"CUDA_VISIBLE_DEVICES": ",".join(named)}


def worker_devices(gpus: Any, tp: Any = 1) -> list[WorkerDevice]:
    """``gpus``: how many, or which; None: all that there are. ``tp``: how many have a model together."""
    if not is_whole(tp) or tp < 1:
        raise ConfigError(f"`tp` is the number of GPUs that have a model together, 1 or more, not {shown(tp)}")
    devices = _devices(gpus)
    if tp == 1:
        return devices
    if len(devices) % tp:
        raise ConfigError(f"`tp` is {tp}: a model takes so many GPUs, and {len(devices)} cannot be divided by it")
    groups = [devices[first : first + tp] for first in range(0, len(devices), tp)]
    if any(len({device.index is None for device in group}) > 1 for group in groups):
        raise ConfigError("a CPU and a GPU cannot have a model together: `gpus` has both")
    for group in groups:
        twice = next((device for place, device in enumerate(group) if device in group[:place]), None)
        if twice is not None and twice.index is not None:
            raise ConfigError(f"a GPU cannot have two parts of a model, and `gpus` has {twice.name} twice")
    return [
        WorkerDevice(first.index, tuple(each.index for each in rest if each.index is not None), tp)
        for first, *rest in groups
    ]


def _devices(gpus: Any) -> list[WorkerDevice]:
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
