"""Runs the cases of a group in a child process, with a limit of time for each case."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

import torch

from ..errors import ConfigError
from ..python_child import CannotStart, python_path, python_program
from .outcomes import CRASHED, HUNG, NO_ROOM, NOT_TRIED, PASSED, UNKNOWN, Outcome
from .which_card import mark_of

_SECONDS = 300.0  # for a case: a slow host takes some seconds to compile a kernel, and a case has up to five
_SECONDS_TO_START = 60.0  # at least, whatever a case is given
_PATIENCE = 10.0  # seconds, with a process that was killed
_START, _END = "start", "end"
_NO_CASES = (_START, _END)  # after these there is nothing that another child could go on with
_CHILD = f"{__package__}.child"
CHECKING = "HF_BATCHLLM_CHECKING"  # in the environment of a child


def outcomes(group: str, device: torch.device, *, to_the_end: bool = False) -> Iterator[Outcome]:
    """One after the other. Without ``to_the_end`` the first case that does not pass is the last."""
    done: list[str] = []
    while True:
        ended = True
        for outcome in _of_one_child(group, device, done):
            yield outcome
            if outcome.verdict != PASSED:
                if not to_the_end or outcome.verdict in UNKNOWN or outcome.case in _NO_CASES:
                    return
                ended = False
            done.append(outcome.case)
            if not ended:
                break  # the rest is for another child: what this one has on the card is not to be relied on
        if ended:
            return


def _of_one_child(group: str, device: torch.device, done: list[str]) -> Iterator[Outcome]:
    command = [python_program(), "-P", "-m", _CHILD, group, str(device), mark_of(device), *done]
    with _file_for_errors() as said:
        try:
            child = subprocess.Popen(
                command, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
                start_new_session=True,
            )  # fmt: skip  # its stdin ends when this process does, however that ends: then the child ends, too
        except OSError as error:
            raise CannotStart(f"{command[0]} cannot be started: {error}") from error
        assert child.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_pass_on, args=(child.stdout, lines), daemon=True)
        reader.start()
        begun = _START
        try:
            while True:
                limit = max(seconds_for_a_case(), _SECONDS_TO_START if begun == _START else 0)
                try:
                    text = _next(lines, child, limit)
                except queue.Empty:
                    verdict = NOT_TRIED if begun == _START else HUNG
                    yield Outcome(begun or _END, verdict, f"stopped after {limit:.0f} s", limit)
                    return
                if text is None:
                    break
                line = _read(text)
                if line is None:  # something else wrote to the pipe, such as a sitecustomize that prints
                    continue
                if "ends" in line:
                    return  # how the process ends is of no account now
                if "begins" in line:
                    begun = line["begins"]
                else:
                    begun = ""
                    outcome = Outcome.of(line)
                    if outcome.verdict == NOT_TRIED:  # what a compiler wrote says more than its exit code
                        outcome = replace(outcome, detail=" ".join([outcome.detail, *_error_said(said)])[:300])
                    yield outcome
                    if line["case"] == _START:
                        return
            code = _end(child)
            yield Outcome(begun or _END, _verdict_of_end(code, begun), _how_it_ended(code, said))
        finally:
            _end(child)
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()
            reader.join(timeout=_PATIENCE)
            if not reader.is_alive():  # else a process that the child has left behind holds the pipe
                child.stdout.close()


def _environment() -> dict[str, str]:
    """The child finds the modules that this process finds, but nothing in the current folder."""
    folders = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    here = {os.path.realpath(os.getcwd()), os.path.dirname(os.path.realpath(sys.argv[0] if sys.argv else ""))}
    folders += [each for each in sys.path if os.path.isabs(each) and os.path.realpath(each) not in here]
    # Products of float32 are not to be rounded to TF32, as NVIDIA's containers have it.
    exact = {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
    return os.environ | exact | {"PYTHONPATH": python_path(folders), CHECKING: "1"}


def _file_for_errors() -> IO[str]:
    try:
        return tempfile.TemporaryFile("w+", errors="replace")
    except OSError as error:
        raise CannotStart(f"there is no folder for temporary files: {error}") from error


def _next(lines: queue.SimpleQueue[str | None], child: subprocess.Popen[str], seconds: float) -> str | None:
    """The next line; None at the end of the process, even if others hold its pipe. Raises ``Empty`` after a while."""
    until = time.monotonic() + seconds
    while True:
        try:
            return lines.get(timeout=max(0.0, min(0.5, until - time.monotonic())))
        except queue.Empty:
            if child.poll() is not None:
                with contextlib.suppress(queue.Empty):
                    return lines.get(timeout=0.5)  # what it wrote at last
                return None
            if time.monotonic() >= until:
                raise


def _end(child: subprocess.Popen[str]) -> int | None:
    """End the child and all that it has started. Gives its exit code, if it had ended by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=0.5)
    code = child.poll()
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a driver cannot be killed
        child.wait(timeout=_PATIENCE)
    return code


def _verdict_of_end(code: int | None, begun: str) -> str:
    if code == -getattr(signal, "SIGKILL", 9):  # as systems do where the memory of the host is short
        return NO_ROOM
    from_outside = [-getattr(signal, name, 0) for name in ("SIGTERM", "SIGINT", "SIGHUP")]
    return NOT_TRIED if begun == _START or (code and code in from_outside) else CRASHED


def seconds_for_a_case() -> float:
    given = os.environ.get("HF_BATCHLLM_CHECK_SECONDS")
    if not given:
        return _SECONDS
    with contextlib.suppress(ValueError):
        if (seconds := float(given)) > 0:
            return seconds
    raise ConfigError(f"HF_BATCHLLM_CHECK_SECONDS is {given!r}; it is a number of seconds above 0")


def _read(text: str) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        line = json.loads(text)
        if isinstance(line, dict) and not line.keys().isdisjoint(("begins", "case", "ends")):
            return line
    return None


def _pass_on(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _error_said(said: IO[str]) -> list[str]:
    """The first line in which a compiler names an error."""
    said.seek(0)
    return [line.strip() for line in said.read().splitlines() if "error:" in line][:1]


def _how_it_ended(code: int | None, said: IO[str]) -> str:
    name = "it fell silent" if code is None else f"exit code {code}"
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
    said.seek(0)
    last = [line.strip() for line in said.read().splitlines() if line.strip()][-1:]
    return " ".join([f"{name}:", *last])[:300] if last else name
