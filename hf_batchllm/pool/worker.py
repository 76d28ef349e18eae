"""A worker: a process with a model of its own, which runs parts of the pool's calls.

Two threads stand beside the one that runs the model. One listens, so that the pool is answered while steps run; it ends
the process where the pool is gone, however that ended. One speaks, so that steps do not wait for the pool.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import time
import warnings
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from .followers import FOLDER, Followers
from .messages import (
    Answered,
    Ask,
    Begun,
    Blame,
    Done,
    End,
    Failed,
    GiveUp,
    Load,
    Parcel,
    Progress,
    Pulse,
    Ready,
    Run,
    Stop,
    Warned,
)
from .piece_claims import PieceClaims

_PULSE = 2.0  # seconds
_RESULTS_EVERY, _MOST_RESULTS = 0.02, 256  # seconds between messages, and results in one of them
_PROGRESS_EVERY = 0.2  # seconds between messages without results


class Worker:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pool = os.getppid()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._moved: float | None = None  # when the last step of a part ended; None while no part runs
        self._claims = PieceClaims({})  # of the latest part
        self._stopped = -1  # a call that is broken off, with all before it
        self._call = -1  # of the latest part
        self._results: list[Any] = []
        self._said = 0.0  # when what has come of it was told of last
        self._read = self._written = 0  # tokens of this call
        self._generator: Any = None
        self._followers: Followers | None = None

    # -- the threads beside --------------------------------------------------------------------------------------

    def start(self) -> None:
        for task in (self._listen, self._speak):
            threading.Thread(target=task, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                message = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                _leave()  # the pool is gone
            if isinstance(message, GiveUp):
                self._claims.give_up(message.pieces)
            elif isinstance(message, Stop):
                self._stopped = max(self._stopped, message.call)
            else:
                if isinstance(message, Run):  # others may take of it before it runs
                    self._claims = PieceClaims(message.piece_of, partial(self._tell_of_piece, message.call))
                self._inbox.put(message)

    def _speak(self) -> None:
        while True:
            try:
                message = self._outbox.get(timeout=_PULSE)
            except queue.Empty:
                moved = self._moved
                message = Pulse(0.0 if moved is None else time.monotonic() - moved)
            if os.getppid() != self._pool:  # a process that it has forked off may keep the socket open
                _leave()
            with contextlib.suppress(OSError):  # whoever listens finds out, and ends the process
                self._connection.send_bytes(pickle.dumps(message))

    def _say(self, message: Any) -> None:
        self._outbox.put(message)

    # -- the thread that runs the model --------------------------------------------------------------------------

    def run(self) -> None:
        while True:
            message = self._inbox.get()
            if isinstance(message, End):
                break
            try:
                if isinstance(message, Load):
                    self._load(message)
                elif isinstance(message, Ask):
                    function, given = message.content.open()
                    value = Parcel.of(function(self._generator, *given), "what a process of the pool found")
                    self._say(Answered(message.call, value))
                else:
                    self._run_part(message)
            except BaseException as error:
                self._failed(error, message)
        if self._followers is not None:
            self._followers.end()
        if self._generator is not None:
            with contextlib.suppress(Exception):
                self._generator.close()

    def _load(self, message: Load) -> None:
        load = message.load.open()
        if load.processes > 1:
            self._followers = Followers(load.processes, load.device, message.load)
        self._generator = load()
        name = self._generator.architecture.name
        self._say(Ready(name, self._generator.loaded, self._generator.token_costs()))

    def _failed(self, error: BaseException, message: Any) -> None:
        from ..errors import RanksError
        from ..model.device_memory import is_device_error, is_out_of_memory

        if isinstance(error, RanksError) and self._followers is not None:
            self._followers.may_have_ended()
        blame = Blame.USERS
        if isinstance(message, Load) or is_device_error(error) or self._generator.group_has_ended:
            blame = Blame.DEVICE
        elif is_out_of_memory(error) or isinstance(error, MemoryError):
            blame = Blame.MEMORY
        self._say(Failed.of(error, getattr(message, "call", None), blame))

    def _run_part(self, message: Run) -> None:
        began = self._moved = time.monotonic()
        if message.call != self._call:
            self._call, self._read, self._written = message.call, 0, 0
        report = None
        try:
            part = message.part.open()
            if message.call > self._stopped:
                try:
                    self._generator.run_part(
                        lambda call: self._begun(part, part.begin(self._generator, call)),
                        self._deliver,
                        self._watch,
                        claims=self._claims,
                        began=message.began,
                    )
                except KeyboardInterrupt:
                    if message.call > self._stopped:  # it is the user's code that raised it
                        raise
                report = self._generator.last_report
        finally:
            self._tell_of_progress()
            self._moved = None
        self._say(Done(message.call, report, time.monotonic() - began))

    def _tell_of_piece(self, call: int, piece: int) -> None:
        self._say(Begun(call, piece))

    def _begun(self, part: Any, finish: Any) -> Any:
        if part.problems:
            self._tell_of_progress(dict(part.problems))
        return finish

    def _deliver(self, results: list[Any]) -> None:
        self._results += results
        self._tell_now_and_then()

    def _watch(self, step: Any, new_tokens: int) -> None:
        """Told of each step, which has been run."""
        if self._call <= self._stopped:
            raise KeyboardInterrupt
        self._moved = time.monotonic()
        self._read += step.tokens - len(step.rows)
        self._written += new_tokens
        self._tell_now_and_then()

    def _tell_now_and_then(self) -> None:
        every = _RESULTS_EVERY if self._results else _PROGRESS_EVERY
        if time.monotonic() - self._said > every or len(self._results) >= _MOST_RESULTS:
            self._tell_of_progress()

    def _tell_of_progress(self, problems: dict[Any, str] | None = None) -> None:
        results, self._results = self._results, []
        self._say(Progress(self._call, results, problems or {}, self._read, self._written))
        self._said = time.monotonic()

    def show_warning(self, message: Any, category: Any, *place: Any, **more: Any) -> None:
        """The pool's process warns, once for all workers."""
        if issubclass(category, UserWarning):
            self._say(Warned(str(message)))
        else:
            print(f"{category.__name__}: {message}", file=sys.stderr)


def _leave() -> None:
    """Nobody else is there who would remove the folder."""
    if FOLDER in os.environ:
        shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
    os._exit(0)


def main() -> None:
    """``python -c ... SOCKET``: the number of an open socket to the pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool says when to stop
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    os.register_at_fork(
        after_in_child=lambda: os.close(connection.fileno())
    )  # else the pool would not see this one end
    worker = Worker(connection)
    warnings.showwarning = worker.show_warning
    worker.start()
    worker.run()
    sys.stdout.flush()
    os._exit(0)  # the device's driver may take its time to say good-bye
