"""What the ranks of torchrun, accelerate launch or srun tell each other: a few words each, and their results.

Words go through the store of the process group, which is asked without waiting for anybody. So a rank that waits sees
that another one has failed, or is gone. Results go by one collective call, once every rank has said that it is there.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError, PoolError

_NO_RANKS = (
    "there are no ranks here: start the script with `torchrun --nproc-per-node N` or `accelerate launch`. Without "
    "them, BatchGenerator runs on one GPU, and GeneratorPool on several"
)
_SIGN_EVERY, _GONE_AFTER = 2.0, 60.0  # seconds between signs of life, and without any from a rank
_LOOK_EVERY = 0.02  # seconds, while this rank waits
_COLLECTIVE = timedelta(hours=1)  # for results: every rank is there, and some may have gigabytes of them


class Ranks:
    """All ranks make it together."""

    def __init__(self) -> None:
        if not dist.is_available() or not (dist.is_initialized() or "RANK" in os.environ):
            raise ConfigError(_NO_RANKS)
        self._own_group = not dist.is_initialized()
        if self._own_group:
            dist.init_process_group("gloo")
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        # Of its own: the user's group may be NCCL's, where words would go over the GPUs.
        self._group = dist.new_group(backend="gloo", timeout=_COLLECTIVE)
        self._store = self._group.get_group_store()
        self._mine: list[str] = []  # keys that this rank has set, in this call and the one before
        self._old: list[str] = []
        self._signs = 0
        self._seen = {rank: (b"", time.monotonic()) for rank in range(self.count)}  # of each rank the last sign of life
        self._closed = threading.Event()
        threading.Thread(target=self._give_signs, daemon=True).start()

    # -- words -----------------------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """What the call before the last one has said is forgotten: no rank can be in it any more."""
        for key in self._old:
            self._store.delete_key(key)
        self._old, self._mine = self._mine, []

    def say(self, key: str, value: Any) -> None:
        self._mine.append(key)
        self._store.set(key, pickle.dumps(value).hex())

    def heard(self, key: str) -> Any:
        """What has been said, or None."""
        return pickle.loads(bytes.fromhex(self._store.get(key).decode())) if self._store.check([key]) else None

    def first_to_say(self, key: str) -> int:
        """The first rank that asked for it."""
        return int(self._store.compare_set(key, "", str(self.rank)))

    def is_said(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def forget(self, keys: list[str]) -> None:
        """In the call after the next one."""
        self._mine += keys

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def exchange(self, key: str, value: Any, look: Callable[[], None] = lambda: None) -> list[Any]:
        """What each rank says. ``look`` is called now and then, and may raise."""
        self.say(f"{key}/{self.rank}", value)
        found: list[Any] = []
        while len(found) < self.count:
            word = f"{key}/{len(found)}"
            if self.is_said(word):
                found.append(self.heard(word))
            else:
                self.look_after(len(found))
                look()
                time.sleep(_LOOK_EVERY)
        return found

    # -- results ---------------------------------------------------------------------------------------------------

    def gather(self, value: Any, everywhere: bool) -> list[Any] | None:
        """Of each rank; None on all but the first, unless it is to be had ``everywhere``."""
        found: list[Any] | None = [None] * self.count if everywhere or not self.rank else None
        if everywhere:
            dist.all_gather_object(found, value, group=self._group)
        else:
            dist.gather_object(value, found, dst=0, group=self._group)
        return found

    # -- life ------------------------------------------------------------------------------------------------------

    def look_after(self, rank: int) -> None:
        """PoolError if it has given no sign of life for long."""
        key = f"alive/{rank}"
        sign = bytes(self._store.get(key)) if self._store.check([key]) else b""
        before, at = self._seen[rank]
        now = time.monotonic()
        if sign != before or rank == self.rank:
            self._seen[rank] = sign, now
        elif now - at > _GONE_AFTER:
            raise PoolError(f"rank {rank} has given no sign of life for {now - at:.0f} s: it is taken to be gone")

    def _give_signs(self) -> None:
        while not self._closed.wait(_SIGN_EVERY):
            self._signs += 1
            try:
                self._store.set(f"alive/{self.rank}", str(self._signs))
            except Exception:  # the rank with the store has ended: so has this one's work
                return

    def close(self) -> None:
        self._closed.set()
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
