"""The elementwise work of layers that carry a state, in two kernels; their references are in ``gated_ops_torch``.

As in ``layer_ops_triton``, each number is read once and written once, and rounded where transformers rounds.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl

from ..reference.gated_ops_torch import NormForm
from .time_step_triton import softplus

_NUMBERS = 2048  # of a block, about


@triton.jit
def _decay_and_beta(
    a, b, a_log, dt_bias, decay, beta, count, a_token, a_head, b_token, b_head, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    nth = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = nth < count
    token, head = (nth // HEADS).to(tl.int64), nth % HEADS
    wide = tl.load(a + token * a_token + head * a_head, mask=inside, other=0.0).to(tl.float32)
    wide += tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32))
    tl.store(decay + nth, -rate * softplus(wide), mask=inside)
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
def _gated_norm(
    x, gate, weight, out, rows, x_token, x_part, gate_token, gate_part, weight_part, eps,
    GATE_FIRST: tl.constexpr, ROUNDS: tl.constexpr, SILU: tl.constexpr,
    PARTS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, place = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    inside = (row < rows)[:, None] & (place < DIM)[None, :]
    token, part = (row // PARTS).to(tl.int64), row % PARTS
    opened = tl.load(gate + (token * gate_token + part * gate_part)[:, None] + place[None, :], mask=inside, other=0.0)
    opened = opened.to(tl.float32)
    opened = (opened if SILU else 1.0) / (1 + tl.exp(-opened))
    given = tl.load(x + (token * x_token + part * x_part)[:, None] + place[None, :], mask=inside, other=0.0)
    wide = given.to(tl.float32)
    if GATE_FIRST:
        wide = wide * opened
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
    factor = tl.load(weight + (part * weight_part)[:, None] + place[None, :], mask=inside, other=0.0)
    if ROUNDS:
        wide = wide.to(given.dtype).to(tl.float32)
    made = wide * factor.to(tl.float32)
    if not GATE_FIRST:
        if ROUNDS and given.dtype == factor.dtype:  # a product of two types is float32
            made = made.to(given.dtype).to(tl.float32)
        made = made * opened
    tl.store(out + row[:, None].to(tl.int64) * DIM + place[None, :], made.to(out.dtype.element_ty), mask=inside)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, form: NormForm) -> torch.Tensor:
    tokens, parts, dim = x.shape
    dtype = torch.promote_types(x.dtype, weight.dtype) if form.gate_first and form.rounds else x.dtype
    out = torch.empty((tokens, parts, dim), dtype=dtype, device=x.device)
    x, gate = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, gate))
    wide = triton.next_power_of_2(dim)
    rows = max(1, _NUMBERS // wide)
    _gated_norm[(triton.cdiv(tokens * parts, rows),)](
        x, gate, weight, out, tokens * parts, *x.stride()[:2], *gate.stride()[:2], dim if len(weight) > dim else 0, eps,
        GATE_FIRST=form.gate_first, ROUNDS=form.rounds, SILU=form.activation == "silu",
        PARTS=parts, DIM=dim, WIDE=wide, ROWS=rows, num_warps=4 if wide <= _NUMBERS else 8, enable_fp_fusion=False,
    )  # fmt: skip
    return out
