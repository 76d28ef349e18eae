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
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import ConfigError
from .outcomes import CRASHED, HUNG, NO_ROOM, PASSED, Outcome

_SECONDS = 300.0  # for a case: a slow host takes some seconds to compile a kernel, and a case has up to five
_ROOT = Path(__file__).resolve().parents[2]  # what the library is imported from
_CHILD = f"{__package__}.child"


class CannotStart(Exception):
    """No child process can be started here."""


def outcomes(group: str, device: torch.device, *, to_the_end: bool = False) -> Iterator[Outcome]:
    """One after the other. Without ``to_the_end`` the first case that does not pass is the last."""
    done: list[str] = []
    while True:
        ended = True
        for outcome in _of_one_child(group, device, done):
            yield outcome
            done.append(outcome.case)
            if outcome.verdict != PASSED and (not to_the_end or outcome.verdict == NO_ROOM or outcome.case == "start"):
                return
            # The rest is for another child: this one is dead, or what it has on the card is not to be relied on.
            ended = outcome.verdict == PASSED
            if not ended:
                break
        if ended:
            return


def _of_one_child(group: str, device: torch.device, done: list[str]) -> Iterator[Outcome]:
    if not sys.executable:
        raise CannotStart("Python does not know its own program (`sys.executable` is empty)")
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", _CHILD, group, str(device), *done]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            child = subprocess.Popen(
                command, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=said, text=True,
            )  # fmt: skip
        except OSError as error:
            raise CannotStart(f"{sys.executable} cannot be started: {error}") from error
        assert child.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_pass_on, args=(child.stdout, lines), daemon=True)
        reader.start()
        begun = "start"
        try:
            while True:
                limit = _SECONDS if begun == "start" else seconds_for_a_case()
                try:
                    text = lines.get(timeout=limit)
                except queue.Empty:
                    yield Outcome(begun, HUNG, f"stopped after {limit:.0f} s", limit)
                    return
                if text is None:
                    break
                line = _read(text)
                if line is None:  # something else wrote to the pipe, such as a sitecustomize that prints
                    continue
                if "begins" in line:
                    begun = line["begins"]
                else:
                    begun = ""
                    yield Outcome.of(line)
            code = child.wait()
            if code == -getattr(signal, "SIGKILL", 9):  # as systems do where the memory of the host is short
                yield Outcome(begun or "end", NO_ROOM, "the system killed it")
            elif code or begun == "start":
                yield Outcome(begun or "end", CRASHED, _how_it_ended(code, said))
        finally:
            child.kill()
            child.wait()
            reader.join()
            child.stdout.close()


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
        if isinstance(line, dict) and ("begins" in line or "case" in line):
            return line
    return None


def _pass_on(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _how_it_ended(code: int, said: IO[str]) -> str:
    name = f"exit code {code}"
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
    said.seek(0)
    last = [line.strip() for line in said.read().splitlines() if line.strip()][-1:]
    return " ".join([f"{name}:", *last])[:300] if last else name
