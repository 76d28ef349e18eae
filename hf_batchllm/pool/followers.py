"""A worker that has its model together with other processes, each on a GPU of its own (tensor parallelism).

The pool knows the worker alone. The others load the model as the worker does, and then follow it from call to call, see
parallel/. What the pool asks is answered by the worker alone: it exchanges nothing, so no other process waits for it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

from ..python_child import python_program
from .messages import Parcel

# In the environment of such a worker: the folder where its ranks find each other, and what they load. The pool's.
FOLDER = "HF_BATCHLLM_GROUP"
_MAIN = "from hf_batchllm.pool.followers import main; main()"
_LOOK_EVERY = 1.0  # seconds, for the worker's end
_AFTER_FAILURE = 20.0  # seconds in which the worker comes to the same failure by itself
_MOST_SAID = 250  # characters of an error
_LAST_WORDS = 0.5  # seconds until a process that has ended is known to have
_NO_LIMIT = timedelta(days=365)  # a rank that is gone is heard of otherwise


class Followers:
    """The processes of the other ranks. The worker is the first rank. ``size``: of all ranks."""

    def __init__(self, size: int, device: str, load: Parcel) -> None:
        self._folder = os.environ[FOLDER]
        self._ends = False
        _loaded_in(self._folder).write_bytes(pickle.dumps(load))
        self._processes = []
        for rank in range(1, size):
            given = str(os.getpid()), str(rank), str(size), device, self._folder
            process = subprocess.Popen([python_program(), "-P", "-u", "-c", _MAIN, *given], stdin=subprocess.DEVNULL)
            self._processes.append(process)
            threading.Thread(target=self._end_with, args=(process, rank), daemon=True).start()
        join_ranks(0, size, device, self._folder)

    def _end_with(self, process: subprocess.Popen[bytes], rank: int) -> None:
        """A model without one of its parts is of no use."""
        code = process.wait()
        if self._ends:
            return
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        with contextlib.suppress(OSError):
            how = _said_in(self._folder, rank).read_text()
        print(f"the process that has part {rank + 1} of the model {how}", flush=True)
        os._exit(1)

    def may_have_ended(self) -> None:
        """Something came of another rank: if it has ended, so does this process, whose last words say how."""
        time.sleep(_LAST_WORDS)

    def end(self) -> None:
        """The worker ends."""
        self._ends = True
        for process in self._processes:
            process.kill()


def _loaded_in(folder: str) -> Path:
    return Path(folder) / "load"


def _said_in(folder: str, rank: int) -> Path:
    """Why the rank has ended."""
    return Path(folder) / f"said-{rank}"


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


def main() -> None:
    """``python -c ... WORKER RANK SIZE DEVICE FOLDER``: the number of the worker's process, and what all ranks know."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker says when to stop
    worker, rank, size, device, folder = sys.argv[1:]
    threading.Thread(target=_end_without, args=[int(worker)], daemon=True).start()
    warnings.showwarning = lambda *given, **more: None  # the worker warns of the same
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- and prints the same, all along
    from transformers.utils import logging

    logging.set_verbosity_error()
    with contextlib.suppress(Exception):  # the worker fails to, too
        join_ranks(int(rank), int(size), device, folder)
    error = _followed(folder)
    with contextlib.suppress(OSError):
        said = " ".join(f"{type(error).__name__}: {error}".split())
        _said_in(folder, int(rank)).write_text(f"failed: {said[:_MOST_SAID]}")
    os._exit(1)  # the device's driver may take its time to say good-bye


def _followed(folder: str) -> BaseException:
    """What ends this process: an error that would come in each call. The worker hears of the others in the call."""
    try:
        generator = pickle.loads(_loaded_in(folder).read_bytes()).open()()
    except BaseException as error:
        time.sleep(_AFTER_FAILURE)
        traceback.print_exc()
        return error
    from ..model.device_memory import is_device_error

    while True:
        try:
            generator.follow()
        except BaseException as error:
            if is_device_error(error) or generator.group_has_ended:
                return error


def _end_without(worker: int) -> None:
    """It may have ended before this process came to look, which then would wait for it for ever."""
    while os.getppid() == worker:
        time.sleep(_LOOK_EVERY)
    os._exit(0)
