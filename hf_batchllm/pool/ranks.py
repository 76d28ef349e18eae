"""What the ranks of torchrun or accelerate launch tell each other, results included.

All of it goes through the store of their process group, or of their launcher where they have made none. A store is
asked without waiting for anybody. So a rank that waits sees that another one has failed, or is gone. A collective call
would wait for a rank that never comes, and needs a process group, which is the script's own affair.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError, PoolError
from ..notices import Notices
from ..wording import first_line

_NO_RANK = (
    "there are {count} processes here by {name}, and no RANK that would say which one this is: start the script with "
    "torchrun or `accelerate launch`, or call torch.distributed.init_process_group first"
)
_COUNTS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_SIGN_EVERY, _GONE_AFTER = 2.0, 60.0  # seconds between signs of life, and without any from a rank
_LATE_AFTER = 60.0  # seconds after which a rank that others wait for is told of
_LOOK_EVERY = 1.0  # seconds between looks at how the others are
_ASK_EVERY = 0.02  # seconds between questions for what a rank waits for
_MOST_BYTES = 4 << 20  # of a value: a store takes some eight megabytes
_made = itertools.count()  # ranks make their generators in the same order


class Ranks:
    """``patience``: seconds in which a step ends."""

    def __init__(self, patience: float, notices: Notices) -> None:
        store, self.rank, self.count = _store()
        self._store: Any = dist.PrefixStore(f"hf_batchllm/{next(_made)}", store)  # type: ignore[attr-defined]
        self._patience = patience
        self._notices = notices
        self._call = 0
        self._said: list[str] = []  # keys of this call
        self._old: list[str] = []  # and of those before, which are forgotten once no rank can be there any more
        self._signs = 0
        self._seen = {rank: (b"", time.monotonic()) for rank in range(self.count)}  # the last sign of each rank
        self._looked = 0.0
        self._moved: float | None = None  # when the last step of this rank ended; None while none is awaited
        self._closed = threading.Event()
        if self.count > 1:
            threading.Thread(target=self._give_signs, daemon=True).start()

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of all ranks. An error or an interrupt of this rank ends it on the others; theirs is raised here."""
        self._call += 1
        self._old, self._said = self._old + self._said, []
        try:
            yield
        except _OfAnotherRankError as theirs:
            theirs.with_traceback(None)  # the error keeps it, and its frames hold the call
            raise theirs.error from None
        except dist.DistError as error:
            why = f"the other ranks cannot be reached, as if rank 0 had ended: {first_line(error)}"
            raise PoolError(why) from None
        except BaseException as error:
            self._say_failure(error)
            raise
        finally:
            self._moved = None

    # -- words -----------------------------------------------------------------------------------------------------

    def say(self, what: str, value: Any) -> None:
        """Heard once all of it is there."""
        key, data = self._key(what, self.rank), pickle.dumps(value)
        parts = range(0, len(data), _MOST_BYTES)
        self._said += [key, *(f"{key}.{number}" for number in range(len(parts)))]
        for number, begin in enumerate(parts):
            self._store.set(f"{key}.{number}", data[begin : begin + _MOST_BYTES])
        self._store.set(key, str(len(parts)))

    def heard(self, what: str, rank: int) -> Any:
        """What this rank has said."""
        key = self._key(what, rank)
        parts = range(int(self._store.get(key)))
        return pickle.loads(b"".join(self._store.get(f"{key}.{number}") for number in parts))

    def exchange(self, what: str, value: Any, arriving: bool = False) -> list[Any]:
        """What each rank says. ``arriving``: they have no work yet."""
        self._moved = None
        self.say(what, value)
        began = time.monotonic()
        for rank in range(self.count):
            while not self._store.check([self._key(what, rank)]):
                self._look()
                if arriving and time.monotonic() - began > _LATE_AFTER:
                    late = f"rank {self.rank} waits for rank {rank}, which has not come to this call"
                    self._notices(f"late {self._call}", late)
                time.sleep(_ASK_EVERY)
        if arriving:  # all are in this call: they have read what was said before, or never will
            while self._old:
                self._store.delete_key(self._old.pop())
        return [self.heard(what, rank) for rank in range(self.count)]

    def _key(self, what: str, rank: int) -> str:
        return f"{self._call}/{what}/{rank}"

    def _say_failure(self, error: BaseException) -> None:
        """To the ranks that are in the call."""
        told = error if isinstance(error, Exception) else PoolError(f"rank {self.rank} was interrupted")
        with contextlib.suppress(Exception):  # the error itself is what its own rank raises
            sent = b""
            with contextlib.suppress(Exception):
                sent = pickle.dumps(told)
            self.say("failure", (sent, f"{type(told).__name__}: {first_line(told)}"))
            self._said.append(f"{self._call}/failed")
            self._store.compare_set(f"{self._call}/failed", "", str(self.rank))  # the first one that fails is heard

    # -- life ------------------------------------------------------------------------------------------------------

    def moved(self) -> None:
        """A step of this rank has ended, or its steps begin. Raises what ends the call, as waiting does."""
        self._moved = time.monotonic()
        self._look()

    def _look(self) -> None:
        """Now and then: raises what another rank has failed with, or that it is gone."""
        if time.monotonic() - self._looked < _LOOK_EVERY:
            return
        self._looked = time.monotonic()
        if self._store.check([f"{self._call}/failed"]):
            rank = int(self._store.get(f"{self._call}/failed"))
            sent, said = self.heard("failure", rank)
            try:
                error = pickle.loads(sent)
            except Exception:  # it could not be sent, or is of a class that this rank does not have
                error = PoolError(said)
            error.add_note(f"it happened on rank {rank}")
            raise _OfAnotherRankError(error)
        for rank in range(self.count):
            if rank != self.rank:
                self._look_after(rank)

    def _look_after(self, rank: int) -> None:
        """PoolError if it has given no sign of life for long, or does not get on."""
        key = f"alive/{rank}"
        sign = bytes(self._store.get(key)) if self._store.check([key]) else b""
        before, at = self._seen[rank]
        now = time.monotonic()
        if sign != before:
            self._seen[rank] = sign, now
        elif now - at > _GONE_AFTER:
            raise PoolError(f"rank {rank} has given no sign of life for {now - at:.0f} s: it is taken to be gone")
        silent = float(sign.split()[1]) if sign else 0.0
        if silent > self._patience:
            raise PoolError(f"rank {rank} has not got on for {silent:.0f} s (`patience`)")

    def _give_signs(self) -> None:
        while not self._closed.wait(_SIGN_EVERY):
            moved = self._moved
            self._signs += 1
            silent = 0.0 if moved is None else time.monotonic() - moved
            try:
                self._store.set(f"alive/{self.rank}", f"{self._signs} {silent:.1f}")
            except Exception:  # whoever has the store has ended: so has this rank's work
                return

    def close(self) -> None:
        self._closed.set()


class _OfAnotherRankError(Exception):
    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


_launchers_store: Any = None  # which can be had once


def _store() -> tuple[Any, int, int]:
    """Where all ranks may write, which rank this is, and how many there are."""
    global _launchers_store
    if dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
        assert group is not None
        return group.get_group_store(), dist.get_rank(), dist.get_world_size()
    if "RANK" not in os.environ:
        several = {name: count for name in _COUNTS if (count := os.environ.get(name, "1")) not in ("", "1")}
        if several:
            name, count = next(iter(several.items()))
            raise ConfigError(_NO_RANK.format(name=name, count=count))
        return dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    if _launchers_store is None:
        _launchers_store = next(iter(dist.rendezvous("env://")))  # type: ignore[attr-defined]
    store, rank, count = _launchers_store
    return store, rank, count
