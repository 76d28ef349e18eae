"""All-reduces of ranks whose GPUs reach each other's memory: kernels of this library add up what lies there.

On two H200, NCCL takes 20 to 30 us for one of a decode step, of which there are two in each layer; these take 4 to 9.
Those of a large step are the group's: one of 64 MB takes 210 us here and 260 there, but the prompts of an 8B model, in
steps of 8,192 rows, took 6.26 s instead of 5.76.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from ..kernels.triton.all_reduce_triton import MOST_PROGRAMS, all_reduce_parts, meet
from ..patches.all_reduced_rows import GroupAllReduce
from ..wording import first_line
from .rank_watch import RankWatch

T = TypeVar("T")
# By the number of ranks: each reads all that the others have, which takes several of them longer than the group's way.
_MOST_BYTES = {2: 32 << 20, 3: 1 << 20, 4: 1 << 19}
_MOST_BYTES_OF_MORE = 1 << 18
_TRIAL_WIDTH = 1000  # numbers
_TRIAL_SECONDS = 60.0  # with the time that the compiler takes


class Ranks(Protocol):
    """What is used of a Group."""

    size: int
    rank: int
    watch: RankWatch

    def exchange(self, value: Any) -> list[Any]: ...


class CannotReachPeers(Exception):
    """Why, in words that follow a colon."""


def open_peer_all_reduce(ranks: Ranks, group: Any, device: torch.device) -> PeerAllReduce:
    """Every rank asks, and all of them get it or CannotReachPeers."""
    import torch.distributed._symmetric_memory as symmetric_memory

    if not ranks.watch.on_one_machine:
        raise CannotReachPeers("the GPUs are in several machines")
    slot = _MOST_BYTES.get(ranks.size, _MOST_BYTES_OF_MORE)
    of_signals = MOST_PROGRAMS * ranks.size * 4

    def reserved() -> torch.Tensor:
        with torch.inference_mode(False):  # the next call may be outside of it
            memory: torch.Tensor = symmetric_memory.empty(of_signals + 2 * slot, dtype=torch.uint8, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)
        return memory

    memory = _on_all(ranks, reserved)
    handle = _on_all(ranks, lambda: symmetric_memory.rendezvous(memory, group.group_name))

    def tried() -> PeerAllReduce:
        each = [handle.get_buffer(rank, (memory.numel(),), torch.uint8) for rank in range(ranks.size)]
        signals = [one[:of_signals].view(torch.int32) for one in each]
        slots = [[one[of_signals + number * slot :][:slot] for one in each] for number in range(2)]
        ended = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        all_reduce = PeerAllReduce(slots, signals, ranks.rank, GroupAllReduce(group), ended, (memory, handle))
        ranks.watch.all_reduces.add(all_reduce)
        _try(all_reduce, ranks, device)
        return all_reduce

    return _on_all(ranks, tried)


def _on_all(ranks: Ranks, make: Callable[[], T]) -> T:
    try:
        made = make()
    except Exception as error:
        ranks.exchange(True)
        raise CannotReachPeers(f"{type(error).__name__}: {first_line(error)}") from error
    if any(ranks.exchange(False)):
        raise CannotReachPeers("that cannot be done on another rank")
    return made


def _try(all_reduce: PeerAllReduce, ranks: Ranks, device: torch.device) -> None:
    """All-reduces of a few rows, twice in each slot. An error where they are wrong, or do not come."""
    done = torch.cuda.Event()
    all_reduce.begin()
    made = [
        all_reduce.total(torch.full((3, _TRIAL_WIDTH), ranks.rank + 1.0 + turn, dtype=torch.float32, device=device))
        for turn in range(4)
    ]
    done.record()
    began = time.monotonic()
    while not done.query():
        if time.monotonic() - began > _TRIAL_SECONDS:
            all_reduce.end()
            raise TimeoutError("an all-reduce did not come")
        time.sleep(0.001)
    for turn, total in enumerate(made):
        if not bool((total == ranks.size * (ranks.size + 1) // 2 + ranks.size * turn).all()):
            raise ArithmeticError("an all-reduce was wrong")


class PeerAllReduce:
    """One rank's. slots: bytes of each rank, which all of them reach, in two slots. All are made in one stream.

    signals: each rank's. group: what does those that are too large. held: what must live as long as this.
    """

    def __init__(
        self,
        slots: Sequence[Sequence[torch.Tensor]],
        signals: Sequence[torch.Tensor],
        rank: int,
        group: GroupAllReduce,
        ended: torch.Tensor,
        held: Any = None,
    ) -> None:
        self._slots, self._signals, self._rank, self._group = slots, signals, rank, group
        self._ended = ended
        self._held = held
        self._next = 0
        self.made = 0
        self._most = slots[0][0].nbytes
        self._views: dict[tuple[int, int, int, torch.dtype], list[torch.Tensor]] = {}

    def begin(self) -> None:
        """The last all-reduce of an earlier run may not have been read by all: its slot is not free before."""
        meet(self._signals, self._ended, self._rank)
        self._next = 0

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows, width = len(x), len(weight)
        if not 0 < rows * width * x.element_size() <= self._most:
            return self._group.product(x, weight)
        parts, out = self._parts(rows, width, x.dtype), x.new_empty(rows, width)
        torch.mm(x, weight.t(), out=parts[self._rank])
        return self._reduced(parts, out)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        if not 0 < x.nbytes <= self._most or not x.is_contiguous():
            return self._group.total(x)
        parts = self._parts(x.numel() // x.shape[-1], x.shape[-1], x.dtype)
        parts[self._rank].copy_(x.view(parts[self._rank].shape))
        return self._reduced(parts, x)

    def _reduced(self, parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        all_reduce_parts(parts, out, self._signals, self._ended, self._rank)
        self.made += 1  # now: what fails before, for want of memory, is waited for by the others
        return out

    def close(self) -> None:
        self._slots, self._signals, self._held = [], [], None
        self._views.clear()

    def end(self) -> None:
        """Kernels wait for no other rank any more, and what they give means nothing. From any thread."""
        self._ended.fill_(1)

    def _parts(self, rows: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """What each rank has in the next slot."""
        slot, self._next = self._next, 1 - self._next
        key = slot, rows, width, dtype
        if key not in self._views:
            if len(self._views) > 4096:
                self._views.clear()
            count = rows * width * dtype.itemsize
            self._views[key] = [part[:count].view(dtype).view(rows, width) for part in self._slots[slot]]
        return self._views[key]
