"""Runs the cases of a group in a child process, with a limit of time for each case."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch

from ..errors import ConfigError
from ..python_child import CannotStart, python_path, python_program
from .comparing import card_of
from .outcomes import BEGUN, CANNOT_TELL, CRASHED, END, HUNG, NO_ROOM, NOT_TRIED, PASSED, START, UNKNOWN, Outcome

_SECONDS = 300.0  # for a case: a slow host takes some seconds to compile a kernel, and a case has up to five
_SECONDS_TO_START = 60.0  # at least, whatever a case is given
_SECONDS_TO_END = 0.5  # by itself
_PATIENCE = 10.0  # seconds, with a process that was killed
_LOOK_EVERY = 0.05  # seconds
_FROM_OUTSIDE = ("SIGTERM", "SIGINT", "SIGHUP")
CHECKING = "HF_BATCHLLM_CHECKING"  # in the environment of a child


def outcomes(group: str, device: torch.device, *, to_the_end: bool = False) -> Iterator[Outcome]:
    """One after the other. Without ``to_the_end`` the first case that does not pass is the last."""
    done: list[str] = []
    while True:
        for outcome in _of_one_child(group, device, done):
            yield outcome
            done.append(outcome.case)
            if outcome.verdict != PASSED:
                break  # the rest is for another child: what this one has on the card is not to be relied on
        else:
            return
        if not to_the_end or outcome.verdict in UNKNOWN or outcome.case in (START, END):
            return


def _of_one_child(group: str, device: torch.device, done: list[str]) -> Iterator[Outcome]:
    begun, rest, limit = START, "", max(seconds_for_a_case(), _SECONDS_TO_START)
    with _started([group, str(device), card_of(device)], done) as (child, told, said):
        until = time.monotonic() + limit
        while True:
            code = child.poll()  # before its last lines are read, so that none is missed
            *lines, rest = (rest + told.read()).split("\n")
            for outcome in (Outcome(*json.loads(line)) for line in lines):
                begun, limit = (outcome.case if outcome.verdict == BEGUN else ""), seconds_for_a_case()
                until = time.monotonic() + limit
                if outcome.case == END:
                    return  # how the process ends is of no account now
                if outcome.verdict == NOT_TRIED:  # what a compiler wrote says more than its exit code
                    errors = [line for line in _lines_of(said) if "error:" in line]
                    outcome = replace(outcome, detail=" ".join([outcome.detail, *errors[:1]])[:300])
                if not begun:
                    yield outcome
                if outcome.case == START:
                    return
            if code is not None:
                yield _without_a_word(begun, code, _lines_of(said))
                return
            if time.monotonic() > until:
                verdict = NOT_TRIED if begun == START else HUNG
                yield Outcome(begun or END, verdict, f"stopped after {limit:.0f} s", limit)
                return
            time.sleep(_LOOK_EVERY)


@contextlib.contextmanager
def _started(given: list[str], done: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], IO[str], Path]]:
    """A child; the file with its outcomes; and the place of what it and its compilers write. In the end it is killed.

    Its stdin ends when this process does, however that ends: then the child ends, too.
    """
    program = python_program()
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            told = stack.enter_context((folder / "outcomes").open("w+", encoding="utf-8"))
            said = stack.enter_context((folder / "said").open("w"))
        except OSError as error:
            raise CannotStart(f"there is no folder for temporary files: {error}") from error
        command = [program, "-P", "-m", f"{__package__}.child", told.name, *given, *done]
        try:
            child = subprocess.Popen(
                command, env=_environment(), stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True
            )
        except OSError as error:
            raise CannotStart(f"{program} cannot be started: {error}") from error
        try:
            yield child, told, folder / "said"
        finally:
            _end(child)


def _environment() -> dict[str, str]:
    """The child finds the modules that this process finds, but nothing in the current folder."""
    folders = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    here = {os.path.realpath(os.getcwd()), os.path.dirname(os.path.realpath(sys.argv[0] if sys.argv else ""))}
    folders += [each for each in sys.path if os.path.isabs(each) and os.path.realpath(each) not in here]
    # Products of float32 are not to be rounded to TF32, as NVIDIA's containers have it.
    exact = {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
    return os.environ | exact | {"PYTHONPATH": python_path(folders), CHECKING: "1"}


def seconds_for_a_case() -> float:
    given = os.environ.get("HF_BATCHLLM_CHECK_SECONDS") or _SECONDS
    with contextlib.suppress(ValueError):
        if (seconds := float(given)) > 0:
            return seconds
    raise ConfigError(f"HF_BATCHLLM_CHECK_SECONDS is {given!r}; it is a number of seconds above 0")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and all that it has started."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_SECONDS_TO_END)
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a driver cannot be killed
        child.wait(timeout=_PATIENCE)
    assert child.stdin is not None
    child.stdin.close()


def _without_a_word(begun: str, code: int, said: list[str]) -> Outcome:
    """What it means that a child ends without its last word."""
    how = f"exit code {code}"
    with contextlib.suppress(ValueError):
        how = signal.Signals(-code).name
    verdict = CRASHED
    if how == "SIGKILL":  # as systems do where the memory of the host is short
        verdict = NO_ROOM
    elif begun == START or how in _FROM_OUTSIDE or code == CANNOT_TELL:
        verdict = NOT_TRIED
    return Outcome(begun or END, verdict, ": ".join([how, *said[-1:]])[:300])


def _lines_of(said: Path) -> list[str]:
    return [line.strip() for line in said.read_text("utf-8", errors="replace").splitlines() if line.strip()]
