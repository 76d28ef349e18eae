"""The twin of ``digest_triton``."""

from __future__ import annotations

import torch

_LANES = 1 << 20  # that are worked on at a time: copies of them are made
_MULTIPLIER = -7046029254386353131


def digest(flat: torch.Tensor) -> torch.Tensor:  # flat: uint8 [bytes], aligned to 4; gives int64, a single one
    count = flat.numel() // 4
    lanes, tail = flat[: 4 * count].view(torch.int32), flat[4 * count :]
    number = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, count, _LANES):
        part = lanes[begin : begin + _LANES].long()
        weights = torch.arange(begin + 1, begin + 1 + len(part), dtype=torch.int64, device=flat.device) * _MULTIPLIER
        number += (part * ((weights ^ (weights >> 32)) | 1)).sum()
    places = torch.arange(len(tail), dtype=torch.int64, device=flat.device)
    return number + (tail.long() * (places * 1000003 + 3037000493)).sum()
