"""Attention in plain PyTorch whose results for a row do not depend on what stands beside it, to the last bit.

A row meets its keys in parts that end at fixed positions, whatever pages they lie in and however many there are. Each
part is a product of the same shape, padded by keys that are not seen. Parts are merged in the order of their positions.
"""

from __future__ import annotations

import torch

KEYS = 128  # of a part; parts end at multiples of it


def attend_parts(
    q: torch.Tensor,  # [pairs, heads, qk_dim]
    k: torch.Tensor,  # [pairs, KEYS, kv_heads, qk_dim]
    v: torch.Tensor,  # [pairs, KEYS, kv_heads, v_dim]
    seen: torch.Tensor,  # [pairs, KEYS] bool; each row sees a key at least
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each row against the keys of one part: weighted values, their sum of weights, the largest score.

    [pairs, heads, v_dim], [pairs, heads], [pairs, heads], in float32 or wider; the first two are still to be divided.
    """
    pairs, keys, kv_heads, dim = k.shape
    group = q.shape[1] // kv_heads
    exact = torch.promote_types(q.dtype, torch.float32)
    # Contiguous: the layout of a product's operands must not depend on how many there are.
    queries = q.to(exact).reshape(pairs * kv_heads, group, dim).contiguous()
    turned = k.to(exact).permute(0, 2, 1, 3).contiguous().view(pairs * kv_heads, keys, dim)
    values = v.to(exact).permute(0, 2, 1, 3).contiguous().view(pairs * kv_heads, keys, -1)
    scores = torch.bmm(queries, turned.transpose(1, 2)).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(pairs, kv_heads, group, keys).masked_fill_(~seen[:, None, None], float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    made = torch.bmm(weights.view(pairs * kv_heads, group, keys), values)
    return made.view(pairs, q.shape[1], -1), weights.sum(-1).view(pairs, -1), peak.view(pairs, -1)


class Merged:
    """The results of rows while their parts come in, in the order of positions."""

    def __init__(self, rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._total = torch.zeros(rows, heads, dtype=dtype, device=device)
        self._peak = torch.full((rows, heads), float("-inf"), dtype=dtype, device=device)
        self._out = torch.zeros(rows, heads, dim, dtype=dtype, device=device)

    def add(self, rows: torch.Tensor, made: torch.Tensor, total: torch.Tensor, peak: torch.Tensor) -> None:
        """One part of each of these ``rows``."""
        before = self._peak[rows]
        largest = torch.maximum(before, peak)
        kept, added = (before - largest).exp_(), (peak - largest).exp_()
        self._out[rows] = self._out[rows] * kept.unsqueeze(-1) + made * added.unsqueeze(-1)
        self._total[rows] = self._total[rows] * kept + total * added
        self._peak[rows] = largest

    def result(self, sinks: torch.Tensor | None = None) -> torch.Tensor:  # [rows, heads, dim]
        total = self._total
        if sinks is not None:  # logits without a value
            total = total + (sinks.to(total.dtype) - self._peak).exp_()
        return self._out / total.unsqueeze(-1)
