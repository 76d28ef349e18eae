"""The workers of a pool, as the pool sees them: started, spoken to, listened to, and ended.

Threads read and write the sockets, so that a Ctrl-C never leaves half a message in one. What comes in is in ``events``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

from ..errors import ConfigError, PoolError
from ..notices import Notices
from ..python_child import CannotStart, python_path, python_program
from .devices import WorkerDevice
from .messages import Died, End, Failed, Load, Pulse, Ready, Warned, packed, packed_for_worker

_MAIN = "from hf_batchllm.pool.worker import main; main()"
NUMBER = "HF_BATCHLLM_WORKER"  # in the environment of a worker: its number, from 0
_LINES_KEPT = 30  # of what a worker printed last
_SECONDS_TO_END = 10.0
_LOOK_EVERY = 1.0  # seconds


class Crew:
    def __init__(
        self,
        devices: Sequence[WorkerDevice],
        load: Callable[[WorkerDevice], Callable[[], Any]],  # what gives the generator on each
        patience: float,  # seconds that a worker may be silent at work
        notices: Notices,
    ) -> None:
        if os.name != "posix":
            raise ConfigError("a pool of processes needs Linux or macOS")
        self.patience = patience
        self._looked = time.monotonic()
        self.events: queue.SimpleQueue[tuple[WorkerHandle, Any]] = queue.SimpleQueue()
        self.notices = notices
        self.loaded: Ready | None = None  # what the first one has loaded
        self.errors: list[BaseException] = []  # of workers that are lost
        self.lost: list[str] = []  # which, and why
        messages = {device: packed_for_worker(Load(load(device)), "what loads the model") for device in set(devices)}
        said: set[str] = set()  # lines that a worker has printed: the others' are the same
        self.workers: list[WorkerHandle] = []
        try:
            for number, device in enumerate(devices):
                self.workers.append(WorkerHandle(number, device, self, len(devices), said))
        except (CannotStart, OSError) as error:
            self.end()
            raise ConfigError(f"no process could be started: {error}") from error
        for worker in self.workers:
            worker.post(messages[worker.device])

    @property
    def alive(self) -> list[WorkerHandle]:
        return [worker for worker in self.workers if not worker.dead]

    def next_event(self, seconds: float) -> tuple[WorkerHandle, Any] | None:
        """What comes next; None if nothing does for so long."""
        if time.monotonic() - self._looked > _LOOK_EVERY:
            self._look()
        try:
            worker, message = self.events.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(message, Warned):
            self.notices(message.text, message.text)
        elif isinstance(message, Failed) and message.fatal:
            self.errors.append(message.error)
            worker.kill(f"failed: {' '.join(f'{type(message.error).__name__}: {message.error}'.split())[:300]}")
        elif isinstance(message, Died):
            worker.dead, worker.at_work = True, False
            self.lost.append(f"{worker.name} {message.why}")
        elif isinstance(message, Ready):
            worker.ready, worker.at_work = True, False
            self._compare(worker, message)
        return worker, message

    def _compare(self, worker: WorkerHandle, loaded: Ready) -> None:
        if self.loaded is None:
            self.loaded = loaded
        elif self.loaded.fingerprint != loaded.fingerprint:
            raise PoolError(
                f"{worker.name} has loaded other weights than those before it, so answers would depend on where a "
                "prompt runs. A function that loads the model must give the same weights each time: load them from a "
                "folder, or set a seed before they are drawn"
            )

    def _look(self) -> None:
        """A worker that hangs is ended, and ``Died`` comes of it."""
        self._looked = now = time.monotonic()
        for worker in self.alive:
            if worker.ready and worker.at_work and now - worker.moved > self.patience:
                worker.kill(f"has not got on for {now - worker.moved:.0f} s")

    def end(self) -> None:
        """Close all, and see to it that no process is left."""
        for worker in self.workers:
            worker.send(End())
        until = time.monotonic() + _SECONDS_TO_END
        for worker in self.workers:
            worker.wait(max(0.0, until - time.monotonic()))


class WorkerHandle:
    def __init__(self, number: int, device: WorkerDevice, crew: Crew, workers: int, said: set[str]) -> None:
        self.number = number
        self.device = device
        self.ready = False
        self.dead = False
        self.at_work = True  # it is loading
        self.moved = time.monotonic()
        self._crew = crew
        self._why = ""  # it was ended from here, if that is not empty
        self._said = said
        self._last_lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        environment = os.environ | device.environment(workers)
        environment |= {"PYTHONPATH": python_path(map(os.path.abspath, sys.path)), NUMBER: str(number)}
        ours, theirs = socket.socketpair()
        with theirs:
            # No fork of this process, which may have used a GPU; and no second run of the user's script.
            self._process = subprocess.Popen(
                [python_program(), "-P", "-c", _MAIN, str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C in a terminal is the pool's
            )
        self._connection = Connection(ours.detach())
        assert self._process.stdout is not None
        tasks: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (self._write, ()),
            (self._read, ()),
            (self._show, (self._process.stdout,)),
        ]
        for task, given in tasks:
            threading.Thread(target=task, args=given, daemon=True).start()

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        """For people."""
        alike = [each for each in self._crew.workers if each.device == self.device]
        which = f" ({alike.index(self) + 1})" if len(alike) > 1 and self in alike else ""
        return f"the process on {self.device.name}{which}"

    # -- speaking ------------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """A message of the pool's own."""
        self._outbox.put(packed(message))

    def post(self, data: bytes) -> None:
        """A message that was packed."""
        self._outbox.put(data)

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._connection.send_bytes(data)
            except OSError:  # whoever reads finds out
                return

    # -- listening -----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            try:
                message = pickle.loads(self._connection.recv_bytes())
            except Exception as error:  # its end, or a message that cannot be read
                if not isinstance(error, EOFError | OSError):
                    self._why = self._why or f"sent something that cannot be read ({error})"
                break
            if isinstance(message, Pulse):
                self.moved = max(self.moved, time.monotonic() - message.silent)
                continue
            self.moved = time.monotonic()
            self._crew.events.put((self, message))
        self.wait(1.0)
        self._crew.events.put((self, Died(self._why or self._how_it_ended())))

    def _show(self, output: IO[str]) -> None:
        """What a worker prints is shown here, once for all workers."""
        for line in output:
            self._last_lines.append(line.rstrip())
            if line.strip() and line not in self._said:
                self._said.add(line)
                with contextlib.suppress(Exception):  # this process's own stderr may be closed
                    print(line, end="", file=sys.stderr, flush=True)

    def _how_it_ended(self) -> str:
        code = self._process.poll()
        name = f"ended with exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                name = f"was killed ({signal.Signals(-code).name})"
        last = [line for line in self._last_lines if line.strip()][-1:]
        return f"{name}, and had printed last: {last[0][:300]}" if last else name

    # -- its end -------------------------------------------------------------------------------------------------

    def kill(self, why: str) -> None:
        self._why = self._why or why
        with contextlib.suppress(OSError):
            self._process.kill()

    def wait(self, seconds: float) -> None:
        """For its end; if that does not come, it is killed."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill("did not end")
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a driver cannot be killed
                self._process.wait(_SECONDS_TO_END)
        self._outbox.put(None)
