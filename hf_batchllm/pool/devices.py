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
    """``gpus``: of the worker, and of further processes that have the model together with it; none for the CPU."""

    gpus: tuple[int, ...]  # as this process counts
    processes: int

    @property
    def name(self) -> str:
        """For people."""
        if not self.gpus:
            return "the CPU"
        *before, last = map(str, self.gpus)
        return f"GPUs {', '.join(before)} and {last}" if before else f"GPU {last}"

    def environment(self, processes: int) -> dict[str, str]:
        """``processes``: how many there are on this machine, which share its cores."""
        made = {}
        if "OMP_NUM_THREADS" not in os.environ:
            made["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        known = visible.split(",") if visible else None
        named = (str(gpu) if known is None else known[gpu].strip() for gpu in self.gpus)
        return made | {"CUDA_VISIBLE_DEVICES": ",".join(named)}


def worker_devices(gpus: Any, tp: Any = 1) -> list[WorkerDevice]:
    """``gpus``: how many, or which; None: all that there are. ``tp``: how many have a model together."""
    if not is_whole(tp) or tp < 1:
        raise ConfigError(f"`tp` is the number of GPUs that have a model together, 1 or more, not {shown(tp)}")
    devices = _devices(gpus)
    if len(devices) % tp:
        raise ConfigError(f"`tp` is {tp}: a model takes so many GPUs, and {len(devices)} cannot be divided by it")
    return [_together(devices[first : first + tp]) for first in range(0, len(devices), tp)]


def _together(devices: Sequence[int | None]) -> WorkerDevice:
    gpus = tuple(gpu for gpu in devices if gpu is not None)
    if 0 < len(gpus) < len(devices):
        raise ConfigError("a CPU and a GPU cannot have a model together: `gpus` has both")
    if len(set(gpus)) < len(gpus):
        twice = next(gpu for gpu in gpus if gpus.count(gpu) > 1)
        raise ConfigError(f"a GPU cannot have two parts of a model, and `gpus` has GPU {twice} twice")
    return WorkerDevice(gpus, len(devices))


def _devices(gpus: Any) -> list[int | None]:
    """GPUs by their numbers; None is the CPU."""
    there = _gpus_there()
    if gpus is None:
        if not there:
            raise ConfigError('torch finds no GPU here. `gpus=["cpu", "cpu"]` runs two processes on the CPU')
        return [*range(there)]
    if is_whole(gpus):
        if gpus < 1:
            raise ConfigError(f"{_WHAT}, 1 or more, not {gpus}")
        if gpus > there:
            raise ConfigError(f"`gpus` is {gpus}, and torch finds {there} here")
        return [*range(gpus)]
    if not isinstance(gpus, Sequence) or isinstance(gpus, str) or not gpus:
        raise ConfigError(f"{_WHAT}, not {shown(gpus)}")
    return [_one(each, there) for each in gpus]


def _one(given: Any, there: int) -> int | None:
    text = str(given)
    if text == "cpu":
        return None
    number = text.removeprefix("cuda:")
    if not number.isdecimal() or isinstance(given, bool):
        raise ConfigError(f"{_WHAT}, and {shown(given)} is none")
    if int(number) >= there:
        raise ConfigError(f"`gpus` has {shown(given)}, and torch finds {there or 'no'} GPU{'s' * (there != 1)} here")
    return int(number)


def _gpus_there() -> int:
    """Counted without beginning to use them: the memory that this takes on each GPU is the workers'."""
    import torch

    return torch.cuda.device_count()


def gpus_from(text: str) -> int | list[str]:
    """From a command line: a number of GPUs, or a list of their numbers."""
    names = [each.strip() for each in text.split(",") if each.strip()]
    return int(names[0]) if len(names) == 1 and "," not in text and names[0].isdecimal() else names
