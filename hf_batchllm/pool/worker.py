"""A worker: a process with a model of its own, which runs parts of the pool's calls.

Two threads stand beside the one that runs the model. One listens, so that the pool is answered while steps run; it ends
the process where the pool is gone, however that ended. One speaks, so that steps do not wait for the pool.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

from .messages import (
    Answered,
    Ask,
    Done,
    End,
    Failed,
    GivenUp,
    GiveUp,
    Load,
    Progress,
    Pulse,
    Ready,
    Results,
    Run,
    Stop,
    Warned,
    packed,
)

_PULSE = 5.0  # seconds
_RESULTS_EVERY, _MOST_RESULTS = 0.02, 256  # seconds between messages, and results in one of them
_PROGRESS_EVERY = 0.2  # seconds


class Worker:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._moved = time.monotonic()  # when something did, in the thread that runs the model
        self._claims: Any = None  # of the part that runs
        self._call = -1  # of which a part runs
        self._stopped = -1  # a call that is broken off, with all before it
        self._results: list[Any] = []
        self._results_sent = self._progress_sent = 0.0
        self._read = self._written = 0
        self._generator: Any = None

    # -- the threads beside --------------------------------------------------------------------------------------

    def start(self) -> None:
        for task in (self._listen, self._speak):
            threading.Thread(target=task, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                message = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # the pool is gone
            except Exception as error:
                self._say(Failed(_sendable(error), fatal=True))
                continue
            if isinstance(message, GiveUp):
                mine = self._claims if self._call == message.call else None
                self._say(GivenUp(message.call, [] if mine is None else mine.give_up(message.pieces)))
            elif isinstance(message, Stop):
                self._stopped = max(self._stopped, message.call)
            else:
                self._inbox.put(message)

    def _speak(self) -> None:
        while True:
            try:
                message = self._outbox.get(timeout=_PULSE)
            except queue.Empty:
                message = Pulse(time.monotonic() - self._moved)
            if message is None:
                return
            try:
                data = packed(message)
            except Exception as error:
                data = packed(Failed(_sendable(error), fatal=True))
            with contextlib.suppress(OSError):  # whoever listens finds out, and ends the process
                self._connection.send_bytes(data)

    def _say(self, message: Any) -> None:
        self._outbox.put(message)

    # -- the thread that runs the model --------------------------------------------------------------------------

    def run(self) -> None:
        while True:
            message = self._inbox.get()
            self._moved = time.monotonic()
            if isinstance(message, End):
                break
            try:
                if isinstance(message, Load):
                    self._load(message)
                elif isinstance(message, Ask):
                    self._say(Answered(message.question, message.function(self._generator, *message.given)))
                elif isinstance(message, Run):
                    self._run_part(message)
            except BaseException as error:
                self._failed(error, message)
        if self._generator is not None:
            with contextlib.suppress(Exception):
                self._generator.close()

    def _load(self, message: Load) -> None:
        began = time.monotonic()
        self._generator = message.load()
        from ..model.weights_fingerprint import fingerprint

        model = self._generator.model
        name, costs = self._generator.architecture.name, self._generator.token_costs()
        self._say(Ready(name, fingerprint(model), costs, time.monotonic() - began))

    def _failed(self, error: BaseException, message: Any) -> None:
        from ..errors import BatchLLMError, CacheMemoryError
        from ..model.device_memory import is_device_error, is_out_of_memory

        of_memory = is_out_of_memory(error) or isinstance(error, (MemoryError, CacheMemoryError))
        fatal = of_memory or isinstance(message, Load) or is_device_error(error)
        if not isinstance(error, BatchLLMError):  # its frames are here alone
            with contextlib.suppress(Exception):
                error.add_note("In a process of the pool:\n" + "".join(traceback.format_exception(error)).rstrip())
        call = message.call if isinstance(message, Run) else None
        question = message.question if isinstance(message, Ask) else None
        self._say(Failed(_sendable(error), fatal, call, question))

    def _run_part(self, message: Run) -> None:
        began = time.monotonic()
        self._read = self._written = 0
        part = message.part
        self._claims, self._call = part.claims(message.pieces), message.call
        report = None
        try:
            if message.call > self._stopped:
                report = self._generator.run_part(
                    lambda call: part.begin(self._generator, call),
                    self._claims,
                    message.began,
                    self._deliver,
                    self._watch,
                )
        finally:
            self._flush()
            self._call, self._claims = -1, None
        seconds = time.monotonic() - began
        self._say(Done(message.call, report, seconds, self._read, self._written, dict(part.problems)))

    def _deliver(self, results: list[Any]) -> None:
        self._results += results
        if len(self._results) >= _MOST_RESULTS or time.monotonic() - self._results_sent > _RESULTS_EVERY:
            self._flush()

    def _flush(self) -> None:
        if self._results:
            self._say(Results(self._call, self._results))
            self._results = []
        self._results_sent = time.monotonic()

    def _watch(self, step: Any, new_tokens: int) -> None:
        """Told of each step, which has been run."""
        if self._call <= self._stopped:
            raise KeyboardInterrupt
        self._moved = now = time.monotonic()
        self._read += step.tokens - len(step.rows)
        self._written += new_tokens
        if self._results and now - self._results_sent > _RESULTS_EVERY:
            self._flush()
        if now - self._progress_sent > _PROGRESS_EVERY:
            self._progress_sent = now
            self._say(Progress(self._call, self._read, self._written))

    def show_warning(self, message: Any, category: Any, *place: Any, **more: Any) -> None:
        """The pool's process warns, once for all workers."""
        if issubclass(category, UserWarning):
            self._say(Warned(str(message)))
        else:
            print(f"{category.__name__}: {message}", file=sys.stderr)


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(packed(error))
        return error
    except Exception:
        said = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", []):
            said.add_note(note)
        return said


def main() -> None:
    """``python -c ... SOCKET``: the number of an open socket to the pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool says when to stop
    worker = Worker(Connection(int(sys.argv[1])))
    warnings.showwarning = worker.show_warning
    worker.start()
    worker.run()
    sys.stdout.flush()
    os._exit(0)  # the device's driver may take its time to say good-bye
