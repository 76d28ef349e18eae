"""Products with few columns, or with an odd number of them, in Triton: a row has the same bits among any others.

For these cuBLAS takes other kernels for other numbers of rows, also where it may not split a sum. Here all blocks are
alike, and each adds up its products from the first to the last. The reference is in ``narrow_products_torch``.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl

_ROWS, _COLUMNS, _DEPTH = 32, 64, 64  # of a block
_EXACT_DEPTH = 32  # in float32


@triton.jit(do_not_specialize=["rows"])
def _narrow_product(
    x, weight, bias, out, rows, x_row, weight_row,
    BIASED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = triton.cdiv(N, BLOCK_N)
    row = (tl.program_id(0) // BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    of_x = x + row[:, None] * x_row + depth[None, :]
    of_weight = weight + column[:, None] * weight_row + depth[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        inside = (k + depth < K)[None, :]
        a = tl.load(of_x + k, mask=inside & (row < rows)[:, None], other=0.0)
        b = tl.load(of_weight + k, mask=inside & (column < N)[:, None], other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if BIASED:
        acc += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    at = out + row[:, None] * N + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < N)[None, :])


def narrow_product(
    x: torch.Tensor,  # [rows, depth]
    weight: torch.Tensor,  # [columns, depth]
    bias: torch.Tensor | None = None,  # [columns]
) -> torch.Tensor:  # [rows, columns]
    (rows, depth), columns = x.shape, len(weight)
    x, weight = (each if each.stride(1) == 1 else each.contiguous() for each in (x, weight))
    out = x.new_empty(rows, columns)
    if rows and columns:
        _narrow_product[(triton.cdiv(rows, _ROWS) * triton.cdiv(columns, _COLUMNS),)](
            x, weight, weight if bias is None else bias.contiguous(), out, rows, x.stride(0), weight.stride(0),
            BIASED=bias is not None, N=columns, K=depth, BLOCK_M=_ROWS, BLOCK_N=_COLUMNS,
            BLOCK_K=_EXACT_DEPTH if x.dtype.itemsize > 2 else _DEPTH, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out
