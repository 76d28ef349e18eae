"""A pool's models in parts, of whose processes one fails or is killed at a moment that a test names."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from support_families import build
from support_pool import all_heard, is_running
from support_quick_workers import quick_followers

from hf_batchllm import BatchResult, GeneratorPool

MOMENTS = ("planning", "rehearsal", "prefill", "decode", "capture")
WAYS = ("fails", "is killed")
LITTLE_MEMORY = 4_000_000  # bytes, in which a call of many prompts is rehearsed
KILLED, TOLD = "was killed (SIGKILL)", "told to break"
_NAME, _TAKEN = "breaks", "broke"  # files
_PATIENCE = 60.0  # seconds


class Broken(RuntimeError):
    """What a process raises that was told to."""


@dataclass(frozen=True)
class LoadsToBreak:
    """Loads a model in two parts. Each process looks at each moment whether it is to break: the first that does, does.

    folder: of the file that says so.
    """

    saved: Path
    folder: Path

    def __reduce__(self) -> Any:
        return _loads_in_a_worker, (self.saved, self.folder)

    def __call__(self) -> Any:
        from support_device_loop import run_over_references
        from transformers import AutoModelForCausalLM
        from transformers.distributed.configuration_utils import DistributedConfig

        run_over_references(pytest.MonkeyPatch())
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


def _loads_in_a_worker(saved: Path, folder: Path) -> LoadsToBreak:
    """Opened before the worker starts its followers."""
    quick_followers()
    return LoadsToBreak(saved, folder)


def break_at(folder: Path, moment: str, rank: int, way: str, after: int = 0) -> None:
    """``after``: how often the process comes to the moment before."""
    written = folder / "written"
    written.write_text(f"{moment},{rank},{way},{after},{time.monotonic_ns()}")
    written.rename(folder / _NAME)


def kill(folder: Path, process_id: int) -> None:
    _note(folder, process_id)
    os.kill(process_id, signal.SIGKILL)


def _note(folder: Path, process_id: int) -> None:
    written = folder / f"written-{process_id}"
    written.write_text(f"{process_id},{time.monotonic()}")
    written.rename(folder / _TAKEN)


def groups_of(pool: GeneratorPool) -> list[list[int]]:
    """The processes of each model, the leader first."""
    groups = [[worker.process_id, *_children_of(worker.process_id)] for worker in pool._crew.alive]
    return [group for group in groups if len(group) == 2]


def _children_of(process_id: int) -> list[int]:
    said = subprocess.run(["pgrep", "-P", str(process_id)], capture_output=True, text=True).stdout
    return [each for each in map(int, said.split()) if is_running(each)]


@dataclass
class Outcome:
    """What has become of a call in which a process breaks."""

    broken: int | None  # the process; None where none came to the moment
    seconds: float  # from then on, until all others had raised, or had exited
    tokens: list[list[int]] | None  # that the call has returned
    said: str  # by the error that it has raised, and by its warnings

    def wrong(self, wanted: list[list[int]], way: str) -> str:
        """Why this is not as it should be; nothing if it is."""
        if self.tokens is not None and self.tokens != wanted:
            return "other answers"
        if self.broken is None:
            return "" if self.tokens is not None else f"nothing was to break: {self.said}"
        if way == "is killed" and self.tokens is None:
            return f"another model has the answers: {self.said}"
        if self.tokens is None and not self.is_told(way):
            return f"the error does not say what happened: {self.said}"
        return ""

    def is_told(self, way: str) -> bool:
        """Whether the error or a warning names what happened. One that breaks when all have answers may end unheard."""
        return (KILLED if way == "is killed" else TOLD) in self.said


def forget(folder: Path) -> None:
    """Nobody breaks any more."""
    for name in (_NAME, _TAKEN):
        (folder / name).unlink(missing_ok=True)


def broken_call(
    pool: GeneratorPool, folder: Path, call: Callable[[], BatchResult], killer: threading.Thread | None = None
) -> Outcome:
    """A call in which a process breaks, as ``break_at`` or ``killer`` has it. That may come when the call has ended."""
    groups, ends, over = groups_of(pool), [0.0], threading.Event()
    if killer is not None:
        killer.start()  # whom it kills is in a group that is known by now
    looks = threading.Thread(target=_look_for_the_end, args=(folder, groups, ends, over))
    looks.start()
    try:
        with all_heard() as heard:
            try:
                tokens, said = call().token_ids, ""
            except Exception as error:
                tokens, said = None, f"{type(error).__name__}: {error}"
            ended = time.monotonic()
        if killer is not None:
            killer.join()
        broken = _broken(folder)
    finally:
        if tokens is None or broken is None:
            over.set()
        looks.join()
    said += " ".join(str(each.message) for each in heard)
    if broken is None:
        return Outcome(None, 0.0, tokens, said)
    if tokens is not None:  # others had the answers
        ended = ends[0]
        until = time.monotonic() + _PATIENCE
        while len(pool) >= len(groups) and time.monotonic() < until:  # it hears of that a little later
            time.sleep(0.01)
    return Outcome(broken[0], ended - broken[1], tokens, said)


def _broken(folder: Path) -> tuple[int, float] | None:
    """The process, and when it did."""
    with contextlib.suppress(OSError):
        process, at = (folder / _TAKEN).read_text().split(",")
        return int(process), float(at)
    return None


def _look_for_the_end(folder: Path, groups: list[list[int]], ends: list[float], over: threading.Event) -> None:
    """Of all processes of the model of which one breaks."""
    while not over.wait(0.02):
        broken = _broken(folder)
        group = next((each for each in groups if broken is not None and broken[0] in each), None)
        if broken is not None and group is not None:
            ends[0] = time.monotonic()
            if not any(map(is_running, group)) or ends[0] > broken[1] + _PATIENCE:
                return


class _Moments:
    """In a process that has a part of the model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inside = ""  # of which moment this process is
        self._asked, self._times = "", 0

    def watch(self) -> None:
        from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
        from hf_batchllm.engine.memory_rehearsal import Rehearsals
        from hf_batchllm.model import device_memory
        from hf_batchllm.model.runner import ModelRunner
        from hf_batchllm.parallel.group import Group
        from hf_batchllm.patches.all_reduced_rows import GroupAllReduce

        def anew(rehearsals: Any, *given: Any) -> Any:
            rehearsals._known.clear()  # of earlier calls
            return beside_the_cache(rehearsals, *given)

        patch, beside_the_cache = pytest.MonkeyPatch(), Rehearsals.beside_the_cache
        patch.setattr(Rehearsals, "beside_the_cache", anew)
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
            patch.setattr(GroupAllReduce, name, self._breaking(getattr(GroupAllReduce, name)))

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
        file = self._folder / _NAME
        with contextlib.suppress(OSError):
            asked, rank, way, after, number = file.read_text().split(",")
            if (asked, rank) != (moment, os.environ.get("RANK", "0")):
                return
            self._asked, self._times = number, self._times + 1 if number == self._asked else 0
            if self._times < int(after):
                return
            file.rename(self._folder / f"taken-{os.getpid()}")  # one process does
            if way == "is killed":
                kill(self._folder, os.getpid())
            _note(self._folder, os.getpid())
            raise Broken(f"{TOLD}, in {moment}")
