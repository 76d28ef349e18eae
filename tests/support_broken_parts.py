"""A pool's models in parts, of whose processes one fails or is killed at a moment that a test names."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from support_families import build

MOMENTS = ("planning", "rehearsal", "prefill", "decode", "capture")
WAYS = ("fails", "is killed")
LITTLE_MEMORY = 4_000_000  # bytes, in which a call of many prompts is rehearsed
_NAME = "breaks"


class Broken(RuntimeError):
    """What a process raises that was told to."""


@dataclass(frozen=True)
class LoadsToBreak:
    """Loads a model in two parts. Each process looks at each moment whether it is to break: the first that does, does.

    folder: of the file that says so.
    """

    saved: Path
    folder: Path

    def __call__(self) -> Any:
        from support_device_loop import run_over_twins
        from transformers import AutoModelForCausalLM
        from transformers.distributed.configuration_utils import DistributedConfig

        run_over_twins(pytest.MonkeyPatch())
        _Moments(self.folder).watch()
        return AutoModelForCausalLM.from_pretrained(
            self.saved, distributed_config=DistributedConfig(tp_size=2), dtype=torch.float32
        ).eval()


@cache
def whole_model() -> Any:
    """With an even vocabulary, which can be spread, and far from ties."""
    config = copy.deepcopy(build("llama").config)
    config.vocab_size += config.vocab_size % 2
    torch.manual_seed(3)
    model = type(build("llama"))(config)
    torch.nn.init.normal_(model.lm_head.weight, std=1.0)
    return model.eval()


def break_at(folder: Path, moment: str, rank: int, way: str) -> None:
    written = folder / "written"
    written.write_text(f"{moment},{rank},{way}")
    written.rename(folder / _NAME)


def has_broken(folder: Path) -> bool:
    return not (folder / _NAME).exists()


class _Moments:
    """In a process that has a part of the model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inside = ""  # of which moment this process is

    def watch(self) -> None:
        from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
        from hf_batchllm.model import device_memory
        from hf_batchllm.model.runner import ModelRunner
        from hf_batchllm.parallel.group import Group
        from hf_batchllm.patches.summed_rows import GroupSums

        patch = pytest.MonkeyPatch()
        patch.setattr(device_memory.HostMemory, "taken_at_once", True)
        patch.setattr(device_memory.HostMemory, "free", lambda _: LITTLE_MEMORY)
        patch.setattr(Group, "begin", self._breaking_after(Group.begin, "planning"))  # followers wait for the plan
        patch.setattr(DecodeGraphs, "capture", self._breaking(DecodeGraphs.capture, "capture"))
        for moment, owner, name in (
            ("rehearsal", ModelRunner, "try_step"),
            ("prefill", ModelRunner, "launch"),
            ("decode", DecodeGraphs, "run_again"),
        ):
            patch.setattr(owner, name, self._inside_of(getattr(owner, name), moment))
        for name in ("total", "product"):  # in the midst of a step, whose other part another process has
            patch.setattr(GroupSums, name, self._breaking(getattr(GroupSums, name)))

    def _inside_of(self, own: Callable[..., Any], moment: str) -> Callable[..., Any]:
        @wraps(own)
        def inside(*given: Any, **named: Any) -> Any:
            before, self._inside = self._inside, self._inside or moment
            try:
                return own(*given, **named)
            finally:
                self._inside = before

        return inside

    def _breaking(self, own: Callable[..., Any], moment: str | None = None) -> Callable[..., Any]:
        @wraps(own)
        def breaking(*given: Any, **named: Any) -> Any:
            self._look(moment or self._inside)
            return own(*given, **named)

        return breaking

    def _breaking_after(self, own: Callable[..., Any], moment: str) -> Callable[..., Any]:
        @wraps(own)
        def breaking(*given: Any, **named: Any) -> Any:
            value = own(*given, **named)
            self._look(moment)
            return value

        return breaking

    def _look(self, moment: str) -> None:
        with contextlib.suppress(OSError):
            file = self._folder / _NAME
            asked, rank, way = file.read_text().split(",")
            if (asked, rank) != (moment, os.environ.get("RANK", "0")):
                return
            file.rename(self._folder / f"taken-{os.getpid()}")  # one process does
            if way == "fails":
                raise Broken(f"told to, in {moment}")
            os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def seconds() -> Iterator[list[float]]:
    took: list[float] = []
    began = time.monotonic()
    try:
        yield took
    finally:
        took.append(time.monotonic() - began)
