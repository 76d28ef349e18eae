"""What the ranks of torchrun or accelerate launch tell each other, results included.

All of it goes through the store of their process group, or of their launcher where they have made none. A store is
asked without waiting for anybody. So a rank that waits sees that another one has failed, or is gone. A collective call
would wait for a rank that never comes, and needs a process group, which is the script's own affair.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError, PoolError
from ..notices import Notices

_NO_RANK = (
    "there are {count} processes here by {name}, and no RANK that would say which one this is: start the script with "
    "torchrun or `accelerate launch`, or call torch.distributed.init_process_group first"
)
_COUNTS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_SIGN_EVERY, _GONE_AFTER = 2.0, 60.0  # seconds between signs of life, and without any from a rank
_LATE_AFTER = 60.0  # seconds after which a rank that others wait for is told of
_LOOK_EVERY = 0.02  # seconds, while this rank waits
_MOST_BYTES = 4 << 20  # of a value: a store takes some eight megabytes


class Ranks:
    """``name``: the same on all ranks, and of no other ``Ranks``. ``patience``: seconds in which a step ends."""

    def __init__(self, name: str, patience: float, notices: Notices) -> None:
        store, self.rank, self.count = _store()
        self._store: Any = dist.PrefixStore(f"hf_batchllm/{name}", store)  # type: ignore[attr-defined]
        self._patience = patience
        self._notices = notices
        self._said: list[list[str]] = [[], []]  # keys to be forgotten: of the call before this one, and of this one
        self._signs = 0
        self._seen = {rank: (b"", time.monotonic()) for rank in range(self.count)}  # the last sign of each rank
        self._moved: float | None = None  # when the last step of this rank ended; None while none is awaited
        self._closed = threading.Event()
        if self.count > 1:
            threading.Thread(target=self._give_signs, daemon=True).start()

    # -- words -----------------------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """What the call before the last one has said is forgotten: no rank can be in it any more."""
        for key in self._said.pop(0):
            self._store.delete_key(key)
        self._said.append([])

    def forget(self, keys: list[str]) -> None:
        """After the next call."""
        self._said[-1] += keys

    def say(self, key: str, value: Any) -> None:
        """Heard once all of it is there."""
        data = pickle.dumps(value)
        parts = range(0, len(data), _MOST_BYTES)
        self.forget([key, *(f"{key}.{number}" for number in range(len(parts)))])
        for number, begin in enumerate(parts):
            self._store.set(f"{key}.{number}", data[begin : begin + _MOST_BYTES])
        self._store.set(key, str(len(parts)))

    def heard(self, key: str) -> Any:
        """What has been said, or None."""
        if not self.is_said(key):
            return None
        parts = range(int(self._store.get(key)))
        return pickle.loads(b"".join(self._store.get(f"{key}.{number}") for number in parts))

    def is_said(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def first_to_say(self, key: str) -> int:
        """The first rank that asked for it."""
        return int(self._store.compare_set(key, "", str(self.rank)))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def wait_for(self, key: str, rank: int, look: Callable[[], None], arriving: bool = False) -> Any:
        """What this rank says. ``look`` is called now and then, and may raise. ``arriving``: it has no work yet."""
        began = time.monotonic()
        while not self.is_said(key):
            look()
            self._look_after(rank)
            if arriving and time.monotonic() - began > _LATE_AFTER:
                self._notices(f"late {key}", f"rank {self.rank} waits for rank {rank}, which has not come to this call")
            time.sleep(_LOOK_EVERY)
        return self.heard(key)

    def exchange(self, key: str, value: Any, look: Callable[[], None], arriving: bool = False) -> list[Any]:
        """What each rank says."""
        self.say(f"{key}/{self.rank}", value)
        return [self.wait_for(f"{key}/{rank}", rank, look, arriving) for rank in range(self.count)]

    # -- life ------------------------------------------------------------------------------------------------------

    def moved(self, at_work: bool = True) -> None:
        """A step has ended, or none is awaited any more."""
        self._moved = time.monotonic() if at_work else None

    def _look_after(self, rank: int) -> None:
        """PoolError if it has given no sign of life for long, or does not get on."""
        key = f"alive/{rank}"
        sign = bytes(self._store.get(key)) if self.is_said(key) else b""
        before, at = self._seen[rank]
        now = time.monotonic()
        if sign != before or rank == self.rank:
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
            try:
                self._store.set(
                    f"alive/{self.rank}", f"{self._signs} {0 if moved is None else time.monotonic() - moved:.1f}"
                )
            except Exception:  # whoever has the store has ended: so has this rank's work
                return

    def close(self) -> None:
        self._closed.set()


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
