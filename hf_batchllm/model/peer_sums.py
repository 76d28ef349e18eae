"""Sums over ranks whose GPUs reach each other's memory: kernels of this library add up what lies there.

NCCL takes 20 to 30 us for the sum of a decode step's layer, of which there are two in each layer; these take about
half. Larger sums take less, too, where there are two ranks. What is too large for the memory goes through it in pieces.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch

from ..kernels.rank_sums_triton import MOST_PROGRAMS, meet, sum_of_parts
from ..patches.summed_rows import GroupSums
from ..wording import first_line

_SLOT_ROWS = 4096  # of hidden states: products of so many rows are as fast as larger ones
# Each rank reads all that the others have. Of more than two, each would read the same many times: large sums are the
# group's.
_MOST_BYTES = {2: 1 << 62, 3: 1 << 20, 4: 1 << 19}
_MOST_BYTES_OF_MORE = 1 << 18

_TRIAL_SECONDS = 60.0  # with the time that the compiler takes
_in_use: WeakSet[PeerSums] = WeakSet()


class Ranks(Protocol):
    """What hosts agree on, as TensorRanks has it."""

    size: int
    rank: int

    def any(self, what: str, said: bool) -> bool: ...

    def have_the_same(self, what: str, parts: Iterable[bytes]) -> bool: ...


class CannotReachPeers(Exception):
    """Why, in words that follow a colon."""


def open_peer_sums(ranks: Ranks, group: Any, device: torch.device, width: int, dtype: torch.dtype) -> PeerSums:
    """For sums of so many numbers in a row. Every rank asks, and all of them get it or CannotReachPeers."""
    import torch.distributed._symmetric_memory as symmetric_memory

    if not ranks.have_the_same("machines", [socket.gethostname().encode()]):
        raise CannotReachPeers("the GPUs are in several machines")
    slot = _SLOT_ROWS * width * dtype.itemsize
    of_signals = MOST_PROGRAMS * ranks.size * 4

    def reserved() -> torch.Tensor:
        memory = symmetric_memory.empty(of_signals + 2 * slot, dtype=torch.uint8, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)
        return memory

    memory = _on_all(ranks, reserved)
    handle = _on_all(ranks, lambda: symmetric_memory.rendezvous(memory, group.group_name))
    each = [handle.get_buffer(rank, (memory.numel(),), torch.uint8) for rank in range(ranks.size)]
    signals = [one[:of_signals].view(torch.int32) for one in each]
    slots = [[one[of_signals + number * slot :][:slot] for one in each] for number in range(2)]
    ended = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
    sums = PeerSums(slots, signals, ranks.rank, GroupSums(group), ended, (memory, handle))
    _on_all(ranks, lambda: _try(sums, ranks, width, dtype, device))
    return sums


def _on_all(ranks: Ranks, make: Any) -> Any:
    made = failed = None
    try:
        made = make()
    except Exception as error:
        failed = error
    if ranks.any("memory for sums", failed is not None):
        said = (
            "that cannot be done on another rank"
            if failed is None
            else f"{type(failed).__name__}: {first_line(failed)}"
        )
        raise CannotReachPeers(said) from failed
    return made


def _try(sums: PeerSums, ranks: Ranks, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """The sums of a few rows, twice in each slot. An error where they are wrong, or do not come."""
    done = torch.cuda.Event()
    sums.begin()
    made = [sums.total(torch.full((3, width), ranks.rank + 1 + turn, dtype=dtype, device=device)) for turn in range(4)]
    done.record()
    began = time.monotonic()
    while not done.query():
        if time.monotonic() - began > _TRIAL_SECONDS:
            sums.end()
            raise TimeoutError("a sum did not come")
        time.sleep(0.001)
    for turn, total in enumerate(made):
        if not bool((total == ranks.size * (ranks.size + 1) // 2 + ranks.size * turn).all()):
            raise ArithmeticError("a sum was wrong")


def end_sums_of(group: Any) -> None:
    """A rank of the group has failed: the others' devices wait for it no more."""
    for sums in list(_in_use):
        if sums.is_of(group):
            sums.end()


class PeerSums:
    """One rank's. slots: bytes of each rank, which all of them reach, in two slots. All sums are made in one stream.

    signals: each rank's. group: what does the sums that are too large. held: what must live as long as this.
    """

    def __init__(
        self,
        slots: Sequence[Sequence[torch.Tensor]],
        signals: Sequence[torch.Tensor],
        rank: int,
        group: GroupSums,
        ended: torch.Tensor,
        held: Any = None,
    ) -> None:
        self._slots, self._signals, self._rank, self._group = slots, signals, rank, group
        self._ended = ended
        self._held = held
        self._next = 0
        self.made = 0
        self._most = min(slots[0][0].nbytes, _MOST_BYTES.get(len(signals), _MOST_BYTES_OF_MORE))
        self._views: dict[tuple[int, int, int, torch.dtype], list[torch.Tensor]] = {}
        _in_use.add(self)

    def is_of(self, group: Any) -> bool:
        return self._group.group is group

    def begin(self) -> None:
        """The last sum of an earlier run may not have been read by all: its slot is not free before."""
        meet(self._signals, self._ended, self._rank)
        self._next = 0

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows, width = len(x), len(weight)
        step = self._rows_at_once(width, weight)
        if not rows or (rows * width * x.element_size() > self._most and len(self._signals) > 2) or not step:
            return self._group.product(x, weight)
        out = x.new_empty(rows, width)
        weight = weight.t()
        for first in range(0, rows, step):
            some = x[first : first + step]
            parts = self._parts(len(some), width, x.dtype)
            torch.mm(some, weight, out=parts[self._rank])
            sum_of_parts(parts, out[first : first + step], self._signals, self._ended, self._rank)
        return out

    def total(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        step = self._rows_at_once(rows.shape[1], x)
        if not len(rows) or (x.nbytes > self._most and len(self._signals) > 2) or not step:
            return self._group.total(x)
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            parts = self._parts(len(some), some.shape[1], x.dtype)
            parts[self._rank].copy_(some)
            sum_of_parts(parts, some, self._signals, self._ended, self._rank)
        return x

    def end(self) -> None:
        """Kernels wait for no other rank any more, and what they give means nothing. From any thread."""
        self._ended.fill_(1)

    def _rows_at_once(self, width: int, like: torch.Tensor) -> int:
        return self._slots[0][0].nbytes // (width * like.element_size())

    def _parts(self, rows: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """What each rank has in the next slot."""
        slot, self._next = self._next, 1 - self._next
        self.made += 1
        key = slot, rows, width, dtype
        if key not in self._views:
            if len(self._views) > 4096:
                self._views.clear()
            count = rows * width * dtype.itemsize
            self._views[key] = [part[:count].view(dtype).view(rows, width) for part in self._slots[slot]]
        return self._views[key]
