"""The reference of ``digest_triton``."""

from __future__ import annotations

import torch

_LANES = 1 << 18  # that are worked on at a time: what is made of them stays in a CPU's cache
_MULTIPLIER = -7046029254386353131


def digest(flat: torch.Tensor) -> torch.Tensor:  # flat: uint8 [bytes], aligned to 4; gives int64, a single one
    count = flat.numel() // 4
    lanes, tail = flat[: 4 * count].view(torch.int32), flat[4 * count :]
    products = torch.arange(1, min(count, _LANES) + 1, dtype=torch.int64, device=flat.device) * _MULTIPLIER
    step = torch.tensor(_LANES, dtype=torch.int64, device=flat.device) * _MULTIPLIER
    weights, values = torch.empty_like(products), torch.empty_like(products)
    number = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in lanes.split(_LANES):
        torch.bitwise_right_shift(products, 32, out=weights)
        weights.bitwise_xor_(products).bitwise_or_(1)
        number += values[: len(part)].copy_(part).mul_(weights[: len(part)]).sum()
        products += step
    places = torch.arange(len(tail), dtype=torch.int64, device=flat.device)
    return number + (tail.long() * (places * 1000003 + 3037000493)).sum()
