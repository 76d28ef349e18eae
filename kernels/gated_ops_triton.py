"""The elementwise work of gated delta nets in two kernels; their twins are in ``gated_ops_torch``.

As in ``layer_ops_triton``, each number is read once and written once, and rounded where transformers rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_NUMBERS = 2048  # of a block, about
_LINEAR_FROM = tl.constexpr(20.0)  # where PyTorch's softplus is its argument


@triton.jit
def _decay_and_beta(
    a, b, a_log, dt_bias, decay, beta, count, a_token, a_head, b_token, b_head, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    nth = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = nth < count
    token, head = (nth // HEADS).to(tl.int64), nth % HEADS
    wide = tl.load(a + token * a_token + head * a_head, mask=inside, other=0.0).to(tl.float32)
    wide += tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32)
    power = tl.exp(tl.minimum(wide, _LINEAR_FROM))
    small = power * (1 - power * (0.5 - power / 3))  # where 1 + power would lose it
    soft = tl.where(power < 1e-3, small, tl.log(1 + power))
    soft = tl.where(wide > _LINEAR_FROM, wide, soft)
    rate = tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32))
    tl.store(decay + nth, -rate * soft, mask=inside)
    moved = tl.load(b + token * b_token + head * b_head, mask=inside, other=0.0).to(tl.float32)
    tl.store(beta + nth, (1 / (1 + tl.exp(-moved))).to(beta.dtype.element_ty), mask=inside)


def decay_and_beta(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads = a.shape
    decay = torch.empty((tokens, heads), dtype=torch.float32, device=a.device)
    beta = torch.empty((tokens, heads), dtype=b.dtype, device=a.device)
    block = 256
    _decay_and_beta[(triton.cdiv(tokens * heads, block),)](
        a, b, a_log, dt_bias, decay, beta, tokens * heads, *a.stride(), *b.stride(), HEADS=heads, BLOCK=block
    )
    return decay, beta


@triton.jit
def _norm_and_gate(
    x, gate, weight, out, rows, x_token, x_head, gate_token, gate_head, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, place = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    inside = (row < rows)[:, None] & (place < DIM)[None, :]
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    at = (token * x_token + head * x_head)[:, None] + place[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
    factor = tl.load(weight + place, mask=place < DIM, other=0.0)
    normed = (wide.to(factor.dtype).to(tl.float32) * factor.to(tl.float32)[None, :]).to(factor.dtype).to(tl.float32)
    opened = tl.load(gate + (token * gate_token + head * gate_head)[:, None] + place[None, :], mask=inside, other=0.0)
    opened = opened.to(tl.float32)
    made = normed * (opened / (1 + tl.exp(-opened)))
    tl.store(out + row[:, None].to(tl.int64) * DIM + place[None, :], made.to(out.dtype.element_ty), mask=inside)


def norm_and_gate(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    tokens, heads, dim = x.shape
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    x, gate = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, gate))
    wide = triton.next_power_of_2(dim)
    rows = max(1, _NUMBERS // wide)
    _norm_and_gate[(triton.cdiv(tokens * heads, rows),)](
        x, gate, weight, out, tokens * heads, *x.stride()[:2], *gate.stride()[:2], eps,
        HEADS=heads, DIM=dim, WIDE=wide, ROWS=rows, enable_fp_fusion=False,
    )  # fmt: skip
    return out
