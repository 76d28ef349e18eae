"""A worker that has its model together with other processes, each on a GPU of its own (tensor parallelism).

The pool knows the worker alone. The parts of calls that its thread for the model runs, the followers are told to run as
well, in the same order. What the followers find is dropped. What the pool asks is answered by the worker alone: nothing
is exchanged then, so a process that fails to answer leaves none waiting for it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from ..python_child import python_program
from .messages import End, Load, Run

FOLDER = "HF_BATCHLLM_GROUP"  # in the environment of such a worker: where its ranks find each other. The pool's
_MAIN = "from hf_batchllm.pool.followers import main; main()"
_LOOK_EVERY = 1.0  # seconds, for the worker's end
_AFTER_FAILURE = 20.0  # seconds in which the worker comes to the same failure by itself
_MOST_SAID = 250  # characters of an error
_LAST_WORDS = 0.5  # seconds until a process that has ended is known to have
_NO_LIMIT = timedelta(days=365)  # a rank that is gone is heard of otherwise


class Followers:
    """As the worker has them, which is the first rank. ``size``: of ranks, with the worker."""

    def __init__(self, size: int, device: str) -> None:
        self._folder = os.environ[FOLDER]
        self._ends = False
        self._connections: list[Connection] = []
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            with theirs:
                given = str(theirs.fileno()), str(os.getpid()), str(rank), str(size), device, self._folder
                process = subprocess.Popen(
                    [python_program(), "-P", "-u", "-c", _MAIN, *given],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            self._connections.append(Connection(ours.detach()))
            threading.Thread(target=self._end_with, args=(process, rank, self._connections[-1]), daemon=True).start()
        self._size, self._device = size, device

    def tell(self, message: Any) -> None:
        """What the worker is about to do."""
        data = pickle.dumps(message)
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the thread that waits for its end ends this process
                connection.send_bytes(data)

    def join(self) -> None:
        """Once all have been told to load the model: be one of the ranks."""
        join_ranks(0, self._size, self._device, self._folder)

    def _end_with(self, process: subprocess.Popen[bytes], rank: int, connection: Connection) -> None:
        """A model without one of its parts is of no use."""
        code = process.wait()
        if self._ends:
            return
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        with contextlib.suppress(EOFError, OSError):
            how = connection.recv_bytes().decode() if connection.poll() else how
        print(f"the process that has part {rank + 1} of the model {how}", flush=True)
        os._exit(1)

    def may_have_ended(self) -> None:
        """Something came of another rank: if it has ended, so does this process, whose last words say how."""
        time.sleep(_LAST_WORDS)

    def end(self) -> None:
        """The worker ends."""
        self._ends = True
        self.tell(End())


def join_ranks(rank: int, size: int, device: str, folder: str) -> None:
    """The process group in which transformers spreads the model. All wait until all are there."""
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    if device != "cpu":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/ranks", rank=rank, world_size=size, timeout=_NO_LIMIT
    )


class Follower:
    """One of them, in its own process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._generator: Any = None

    def run(self) -> None:
        while True:
            try:
                message = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                return
            if isinstance(message, End):
                return
            try:
                self._do(message)
            except BaseException as error:  # the worker comes to it as well, or hears of it in what ranks exchange
                from ..model.device_memory import is_device_error

                if isinstance(message, Load):
                    time.sleep(_AFTER_FAILURE)
                    traceback.print_exc()
                # What would come in each call. And a worker on a CPU waits for the others' parts until they end.
                if isinstance(message, Load) or is_device_error(error) or self._group_has_ended():
                    with contextlib.suppress(OSError):
                        said = " ".join(f"{type(error).__name__}: {error}".split())
                        self._connection.send_bytes(f"failed: {said[:_MOST_SAID]}".encode())
                    return

    def _group_has_ended(self) -> bool:
        return self._generator is not None and self._generator._group.watch.failure is not None

    def _do(self, message: Any) -> None:
        if isinstance(message, Load):
            self._generator = message.load.open()()
        elif isinstance(message, Run):
            self._generator.run_part(
                lambda call: message.part.open().begin(self._generator, call),
                lambda results: None,
                lambda step, new_tokens: None,
            )


def main() -> None:
    """``python -c ... SOCKET WORKER RANK SIZE DEVICE FOLDER``: numbers of an open socket to the worker, and its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker says when to stop
    number, worker, rank, size, device, folder = sys.argv[1:]
    connection = Connection(int(number))
    os.set_inheritable(connection.fileno(), False)
    threading.Thread(target=_end_without, args=[int(worker)], daemon=True).start()
    warnings.showwarning = lambda *given, **more: None  # the worker warns of the same
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- and prints the same, all along
    from transformers.utils import logging

    logging.set_verbosity_error()
    with contextlib.suppress(Exception):  # the worker fails to, too
        join_ranks(int(rank), int(size), device, folder)
    Follower(connection).run()
    os._exit(0)  # the device's driver may take its time to say good-bye


def _end_without(worker: int) -> None:
    """It may have ended before this process came to look, which then would wait for it for ever."""
    while os.getppid() == worker:
        time.sleep(_LOOK_EVERY)
    os._exit(0)
