"""A number of a tensor's bytes that depends on the place of each of them, in one pass over them."""

from __future__ import annotations

import torch

import triton
import triton.language as tl

_BLOCK = 2048  # numbers of 4 bytes that a program takes at a time
_TURNS = 16  # how often


@triton.jit
def _digest(lanes, tail, out, count, tail_count, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * TURNS)
    sums = tl.zeros([BLOCK], dtype=tl.int64)
    for turn in range(TURNS):
        place = first + turn * BLOCK + tl.arange(0, BLOCK)
        lane = tl.load(lanes + place, mask=place < count, other=0).to(tl.int64)
        weight = (place + 1) * -7046029254386353131
        weight = (weight ^ (weight >> 32)) | 1
        sums += lane * weight
    if tl.program_id(0) == 0:
        at = tl.arange(0, 4)
        last = tl.load(tail + at, mask=at < tail_count, other=0).to(tl.int64)
        tl.atomic_add(out, tl.sum(last * (at.to(tl.int64) * 1000003 + 3037000493)))
    tl.atomic_add(out, tl.sum(sums))  # whole numbers: in any order they add up to the same


def digest(flat: torch.Tensor) -> torch.Tensor:  # flat: uint8 [bytes], aligned to 4; gives int64, a single one
    count = flat.numel() // 4
    out = torch.zeros((), dtype=torch.int64, device=flat.device)
    lanes, tail = flat[: 4 * count].view(torch.int32), flat[4 * count :]
    grid = (max(1, triton.cdiv(count, _BLOCK * _TURNS)),)
    _digest[grid](lanes, tail, out, count, tail.numel(), _BLOCK, _TURNS)
    return out
