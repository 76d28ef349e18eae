"""A worker as the pool sees it: its process, what it is at, and how it ended.

Threads read and write its socket, so that a Ctrl-C never leaves half a message in it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from ..python_child import python_path, python_program
from .devices import WorkerDevice
from .followers import FOLDER
from .messages import Answered, Blame, Died, Done, End, Failed, Pulse, Ready

_MAIN = "from hf_batchllm.pool.worker import main; main()"
NUMBER = "HF_BATCHLLM_WORKER"  # in the environment of a worker: its number, from 0
_LINES_KEPT = 30  # of what a worker printed last
_PATIENCE = 10.0  # seconds, with a process that was killed
_LAST_WORDS = 1.0  # seconds in which a process that has ended is read to its end


class WorkerHandle:
    def __init__(
        self,
        number: int,
        device: WorkerDevice,
        devices: Sequence[WorkerDevice],  # of all workers
        events: queue.SimpleQueue[tuple[WorkerHandle, Any]],
        said: dict[str, int],  # lines, and which worker printed each first
    ) -> None:
        self.number = number
        self.device = device
        alike = [place for place, each in enumerate(devices) if each == device]
        which = f" ({alike.index(number) + 1})" if len(alike) > 1 else ""
        self.name = (
            f"the {'group of processes' if device.processes > 1 else 'process'} on {device.name}{which}"  # for people
        )
        # Set by the thread that reads.
        self.loaded: Ready | None = None
        self.dead = False
        self.error: BaseException | None = None  # after which it was of no further use
        self.how_it_ended = ""
        self.moved = time.monotonic()
        self._finished = 0  # of what it was told to do
        # Set by the thread that tells it what to do.
        self._begun = 0
        self._ended_at: float | None = None
        self._events = events
        self._why = ""  # it was ended from here, if that is not empty
        self._gone = False  # it has ended, and so has all that it had started
        self._said = said
        self._last_lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._folder: str | None = None
        self._start(sum(each.processes for each in devices))

    def _start(self, processes: int) -> None:
        environment = os.environ | self.device.environment(processes)
        environment |= {"PYTHONPATH": python_path(map(os.path.abspath, sys.path)), NUMBER: str(self.number)}
        environment.pop(FOLDER, None)  # this process may be such a worker
        if self.device.processes > 1:  # however the worker ends, it can be removed from here
            self._folder = environment[FOLDER] = tempfile.mkdtemp(prefix="hf_batchllm-")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # No fork of this process, which may have used a GPU; and no second run of the user's script.
                self._process = subprocess.Popen(
                    [python_program(), "-P", "-u", "-c", _MAIN, str(theirs.fileno())],
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C in a terminal is the pool's
                )
            except BaseException:
                self._remove_folder()
                raise
        self._connection = Connection(ours.detach())
        tasks = self._write, self._read, self._show
        self._threads = [threading.Thread(target=task, daemon=True) for task in tasks]
        for thread in self._threads:
            thread.start()

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def free(self) -> bool:
        """Whether it has the model, and nothing to do."""
        return self.loaded is not None and self._begun == self._finished and not self.dead

    # -- speaking ------------------------------------------------------------------------------------------------

    def begin(self, message: Any) -> None:
        """Give it something to do, after which it says that it has done it, or failed."""
        self._begun += 1
        self.moved = time.monotonic()
        self._outbox.put(message)

    def tell(self, message: Any) -> None:
        self._outbox.put(message)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send_bytes(pickle.dumps(message))
            except OSError:  # whoever reads finds out
                return

    # -- listening -----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            try:
                message = pickle.loads(self._connection.recv_bytes())
            except Exception:  # its end, or half a message
                break
            if isinstance(message, Pulse):
                self.moved = max(self.moved, time.monotonic() - message.silent)
                continue
            self.moved = time.monotonic()
            if isinstance(message, Ready):
                self.loaded = message
            if isinstance(message, Ready | Answered | Done | Failed):
                self._finished += 1
            if isinstance(message, Failed) and message.blame is Blame.DEVICE:
                self.error = message.opened()
                self.kill(f"failed: {message.text[:300]}")
            self._events.put((self, message))
        self._reap()

    def _reap(self) -> None:
        """It has ended, or is ended now. ``Died`` is said once."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS)
        self.kill("")
        self._threads[-1].join(_LAST_WORDS)  # what it had printed last may not have been read yet
        with self._lock:
            if self.dead:
                return
            self._remove_folder()
            self.how_it_ended = self._why or self._how_it_ended()
            self.dead = True
        self._outbox.put(None)
        self._events.put((self, Died()))

    def look(self, patience: float) -> None:
        """Whether it is there: a process that it has started may keep the socket open. And whether it gets on."""
        now = time.monotonic()
        if self._process.poll() is not None:
            self._ended_at = self._ended_at or now
            if now - self._ended_at > _LAST_WORDS:
                self._reap()
        elif self.loaded is not None and self._begun > self._finished and now - self.moved > patience:
            self.kill(f"has not got on for {now - self.moved:.0f} s")

    def _show(self) -> None:
        """What a worker prints is shown here, but for lines that another has printed before."""
        for line in self._process.stdout or ():
            self._last_lines.append(line.rstrip())
            if self._said.setdefault(line, self.number) == self.number:
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

    def tell_to_end(self) -> None:
        if self.loaded is None:  # nothing is lost with it
            self.kill("was not needed any more")
        self._outbox.put(End())

    def kill(self, why: str) -> None:
        """With all that it has started, in its session."""
        self._why = self._why or why
        if self._gone:  # its number may be another's by now
            return
        self._gone = self._process.poll() is not None
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self, seconds: float) -> None:
        """For its end; if that does not come, it is killed."""
        try:
            self._process.wait(seconds)
            self.kill("")
        except subprocess.TimeoutExpired:
            self.kill("did not end")
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a driver cannot be killed
            self._process.wait(_PATIENCE)
        self._remove_folder()
        self._outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # whichever drops the pool last ends it
                thread.join(_LAST_WORDS)
        if not any(thread.is_alive() for thread in self._threads):
            self._connection.close()  # and not by its finalizer, in which an interrupt would be lost
