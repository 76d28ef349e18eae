"""Plain PyTorch references of ``experts_triton``: same signatures, same results.

They round where transformers' grouped products round: after a product, after its bias, after each operation of the
activation; and a token's results are added up in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from .routing_torch import RowsOfExperts

ACTIVATIONS = ("silu", "gelu_tanh", "gpt_oss")


@dataclass(frozen=True)
class Gating:
    """How the products of gate and up become one.

    "gpt_oss" is ``(up + 1) * gate * sigmoid(alpha * gate)``. The others are ``activation(gate) * up``.
    """

    activation: str = "silu"
    limit: float | None = None  # gate is at most this large, up at most so far from 0; both before the activation
    alpha: float = 1.702  # of "gpt_oss" alone
    interleaved: bool = False  # columns are gate, up, gate, up, ...; else all of gate come before all of up

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is none of {', '.join(ACTIVATIONS)}")


def up_products(
    x: torch.Tensor,  # [tokens, hidden]
    weight: torch.Tensor,  # [experts, 2 * inter, hidden], of any strides
    bias: torch.Tensor | None,  # [experts, 2 * inter]
    rows: RowsOfExperts,
    top: int,
    gating: Gating,
) -> torch.Tensor:  # [tiles * tile, inter]; rows of a tile that it does not have are left as they are
    out = x.new_empty(len(rows.tiles) * rows.tile, weight.shape[1] // 2)
    for expert, pairs, places in _by_expert(rows):
        both = functional.linear(x[pairs // top], weight[expert])
        out[places] = gated(both if bias is None else both + bias[expert], gating)
    return out


def down_products(
    made: torch.Tensor,  # [tiles * tile, inter]
    weight: torch.Tensor,  # [experts, hidden, inter], of any strides
    bias: torch.Tensor | None,  # [experts, hidden]
    rows: RowsOfExperts,
) -> torch.Tensor:  # [pairs, hidden]; 0 for those without an expert
    out = made.new_zeros(rows.total, weight.shape[1])
    for expert, pairs, places in _by_expert(rows):
        result = functional.linear(made[places], weight[expert])
        out[pairs] = result if bias is None else result + bias[expert]
    return out


def sum_of_shares(made: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:  # [pairs, hidden], [tokens, top]
    """Each token's results, weighted: [tokens, hidden]. Shares in float32 are multiplied in float32."""
    weighted = made.view(*shares.shape, -1) * shares.unsqueeze(-1)
    return weighted.sum(dim=1, dtype=torch.float32).to(made.dtype)


def gated(both: torch.Tensor, gating: Gating) -> torch.Tensor:  # [rows, 2 * inter] -> [rows, inter]
    gate, up = (both[:, ::2], both[:, 1::2]) if gating.interleaved else both.chunk(2, dim=-1)
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    if gating.activation == "gpt_oss":
        return (up + 1) * (gate * torch.sigmoid(gate * gating.alpha))
    if gating.activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    return functional.silu(gate) * up


def _by_expert(rows: RowsOfExperts) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each tile's expert, its pairs, and their places in a matrix that has ``tile`` rows for each tile."""
    counts = rows.counts.tolist()
    for nth, (expert, first) in enumerate(rows.tiles.tolist()):
        if expert >= 0:
            pairs = rows.pairs[expert, first : min(first + rows.tile, counts[expert])].long()
            yield expert, pairs, nth * rows.tile + torch.arange(len(pairs), device=pairs.device)
