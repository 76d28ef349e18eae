"""All-reduces of the GPUs of several processes, which read each other's memory: no library stands between them.

A rank puts its part into memory that all GPUs can reach, and says so in signals that lie there, too. Once all have said
so, each rank reads all parts and adds them up by itself, in the same order, so that all have the same sums. Nobody says
that it has read: parts go into two slots in turn. A rank that has come to the next one has read what the last one was
made of, so the slot before is free again.

A rank that never comes would be waited for without end. The host ends that: kernels look at a number of its memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import triton
import triton.language as tl

MOST_PROGRAMS = 256  # each of which has signals of its own
_BLOCK = 4096  # elements that a program adds up at a time
_WARPS = 8
_TRIES = tl.constexpr(512)  # before a program looks whether all is ended


@triton.jit
def _turn(signal, before, after, ended, SEM: tl.constexpr):
    """Wait until the signal is ``before``, and make it ``after``."""
    found = tl.atomic_cas(signal, before, after, sem=SEM, scope="sys")
    tries = 0
    while found != before:
        found = tl.atomic_cas(signal, before, after, sem=SEM, scope="sys")
        tries += 1
        if tries % _TRIES == 0:
            found = tl.where(tl.load(ended, volatile=True) != 0, before, found)


@triton.jit
def _wait_for_all(signals, ended, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Until this program has come to the same place on all ranks. A signal is 1 until it has been seen."""
    mine = tl.program_id(0) * RANKS
    seen = tl.full([], 0, tl.int32)
    for other in tl.static_range(RANKS):
        if other != RANK:
            _turn(signals[other] + mine + RANK, seen, seen + 1, ended, "release")
    for other in tl.static_range(RANKS):
        if other != RANK:
            _turn(signals[RANK] + mine + other, seen + 1, seen, ended, "acquire")


@triton.jit
def _meet(signals, ended, RANK: tl.constexpr, RANKS: tl.constexpr):
    _wait_for_all(signals, ended, RANK, RANKS)


@triton.jit
def _add_parts(
    parts,  # a tuple: each rank's
    out,
    signals,  # a tuple: each rank's, [programs, ranks]
    ended,
    count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _wait_for_all(signals, ended, RANK, RANKS)
    tl.debug_barrier()  # one thread has seen the signals: what follows is for all of them
    for piece in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = piece * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for other in tl.static_range(RANKS):  # what another rank has written may not come out of a cache
            total += tl.load(parts[other] + at, mask=at < count, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)


def all_reduce_parts(
    parts: Sequence[torch.Tensor],  # each rank's, of the same shape
    out: torch.Tensor,
    signals: Sequence[torch.Tensor],  # each rank's [MOST_PROGRAMS, ranks] int32, zeros at first
    ended: torch.Tensor,  # [1] int32 of the host's memory; other than 0: wait for nobody
    rank: int,
    programs: int = MOST_PROGRAMS,
) -> torch.Tensor:
    count = out.numel()
    grid = (min(triton.cdiv(count, _BLOCK), programs, MOST_PROGRAMS),)
    of_all = tuple(parts), out, tuple(signals), ended, count
    _add_parts[grid](*of_all, RANK=rank, RANKS=len(parts), BLOCK=_BLOCK, num_warps=_WARPS)
    return out


def meet(signals: Sequence[torch.Tensor], ended: torch.Tensor, rank: int) -> None:
    """Each rank's device waits until all have come here: they have then read all parts of earlier ones."""
    _meet[(1,)](tuple(signals), ended, RANK=rank, RANKS=len(signals), num_warps=1)
