"""Processes of a pool, forked off one that has imported what they need: to start Python anew takes seconds of a core.

What they do from then on is the same. A script that a test runs starts its own as users do. So does ``started_anew``.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hf_batchllm.pool import worker_handle

_MOST_BYTES = 1 << 18  # of a message


class ForkServer:
    """Started on first use. It ends with this process, and what was forked off with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._owner = 0
        self._codes: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str], connection: int, output: int) -> int:
        with self._lock:
            if self._channel is None or self._owner != os.getpid():
                self._channel = self._begin()
            asked = pickle.dumps((dict(environment), os.getcwd()))
            socket.send_fds(self._channel, [asked], [connection, output])
            self._channel.settimeout(120)
            while (answer := self._answer()) is None or answer[0] != "started":
                pass
            return int(answer[1])

    def code_of(self, process_id: int) -> int | None:
        with self._lock:
            assert self._channel is not None
            self._channel.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                while self._answer() is not None:
                    pass
            return self._codes.get(process_id)

    def _answer(self) -> Any:
        assert self._channel is not None
        data = self._channel.recv(_MOST_BYTES)
        answer = pickle.loads(data)
        if answer[0] == "ended":
            self._codes[answer[1]] = answer[2]
        return answer

    def _begin(self) -> socket.socket:
        self._owner, self._codes = os.getpid(), {}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(  # kept: one that is forgotten while it runs is warned of
                [sys.executable, "-u", "-c", "from support_quick_workers import serve; serve()", str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
                cwd=Path(__file__).parent,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C of tests is not for it
            )
        return ours


def serve() -> None:
    """In the process that others are forked off. One thread, so that a fork leaves no lock behind."""
    import support_families  # noqa: F401

    from hf_batchllm import BatchGenerator
    from hf_batchllm.pool import part_generator, worker

    assert BatchGenerator and part_generator
    channel = socket.socket(fileno=int(sys.argv[1]))
    while True:
        if select.select([channel], [], [], 0.02)[0]:
            data, given, *_ = socket.recv_fds(channel, _MOST_BYTES, 2)
            if not data:
                os._exit(0)
            child = os.fork()
            if not child:
                channel.close()
                _become(given, *pickle.loads(data))
                worker.main()
                return
            for each in given:
                os.close(each)
            channel.send(pickle.dumps(("started", child)))
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                channel.send(pickle.dumps(("ended", ended[0], os.waitstatus_to_exitcode(ended[1]))))


def _become(given: Sequence[int], environment: dict[str, str], folder: str) -> None:
    connection, output = given
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = io.TextIOWrapper(os.fdopen(number, "wb", 0, closefd=False), write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    known = set(sys.path)
    sys.path[:0] = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each not in known]
    sys.argv = ["-c", str(connection)]


_SERVER = ForkServer()


class Forked:
    """As ``subprocess.Popen``, as far as a WorkerHandle uses it."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **others: Any
    ) -> None:
        ours, theirs = os.pipe()
        try:
            self.pid = _SERVER.start(env, pass_fds[0], theirs)
        finally:
            os.close(theirs)
        self.stdout = os.fdopen(ours, errors=others["errors"])
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _SERVER.code_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
            time.sleep(0.01)
        return code


def _popen(command: Sequence[str], **given: Any) -> Any:
    usual = command[0] == sys.executable and command[-2] == worker_handle._MAIN
    return Forked(command, **given) if usual else subprocess.Popen(command, **given)


def quick_workers() -> None:
    """From now on, pools of this process have such workers, where there is a fork."""
    if sys.platform == "linux" and not torch.cuda.is_available():  # a driver is not to be forked
        worker_handle.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _popen})  # type: ignore[assignment]


@contextlib.contextmanager
def started_anew() -> Iterator[None]:
    """Workers are started as users start them."""
    before, worker_handle.subprocess = worker_handle.subprocess, subprocess
    try:
        yield
    finally:
        worker_handle.subprocess = before
