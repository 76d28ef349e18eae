"""Mixtures of experts in three Triton kernels; their references are in ``experts_torch``.

Two multiply the tiles into which ``routing_triton`` has cut the rows of each expert: the first ends in the activation,
so that gate and up are never written. The last adds up each token's results. All shapes follow from the number of
tokens, and no size is read on the host: a CUDA graph can hold them.

The weights of an expert are read where they lie. In a decode step that is nearly all there is to do, so tiles are
narrow and many: each multiprocessor has several blocks whose loads are under way at once. Prompts have rows enough for
wide tiles.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..cards import ExpertTiles, Tile, card_in_use, card_on
from ..reference.experts_torch import ACTIVATIONS, Gating
from ..reference.routing_torch import RowsOfExperts

_SILU, _GELU_TANH, _GPT_OSS = (tl.constexpr(ACTIVATIONS.index(name)) for name in ACTIVATIONS)
_ALL = tl.constexpr(tl.PropagateNan.ALL)
_TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
_SUM_BLOCK = 1024  # numbers of a token for each block
_GROUP = 8  # tiles that are computed beside each other, column by column, so that weights are read once for all


_EXACT = ExpertTiles(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))  # float32 is multiplied without tensor cores


def tiles_for(pairs: int, experts: int, dtype: torch.dtype) -> ExpertTiles:
    if dtype.itemsize > 2:
        return _EXACT
    return next(tiles for most, tiles in card_in_use().experts if pairs <= most * experts)


@triton.jit
def _rounded(x, LIKE: tl.constexpr):
    return x.to(LIKE).to(tl.float32)


@triton.jit
def _gated(gate, up, limit, alpha, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr, TYPE: tl.constexpr):
    """The gated activation of float32 tiles. Each operation rounds as it does on tensors of TYPE."""
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=_ALL)
        up = tl.minimum(tl.maximum(up, -limit, propagate_nan=_ALL), limit, propagate_nan=_ALL)
    if ACTIVATION == _GPT_OSS:
        turned = _rounded(1 / (1 + tl.exp(-_rounded(gate * alpha, TYPE))), TYPE)
        return _rounded(up + 1, TYPE) * _rounded(gate * turned, TYPE)
    if ACTIVATION == _GELU_TANH:
        # tanh(u) = 2 sigmoid(2u) - 1; 1 + tanh(u) loses digits where u is negative, as it does in PyTorch
        tanh = 2.0 * tl.sigmoid((gate + 0.044715 * (gate * gate * gate)) * _TWO_SQRT_2_OVER_PI) - 1.0
        return _rounded(0.5 * gate * (1.0 + tanh), TYPE) * up
    return _rounded(gate / (1 + tl.exp(-gate)), TYPE) * up


def rows_of_a_tile(pairs: int, experts: int, dtype: torch.dtype) -> int:
    return tiles_for(pairs, experts, dtype).rows


def _in_boxes(weight: torch.Tensor) -> bool:
    """Whether the card's copy engine is to take it, box by box."""
    whole = card_on(weight.device).descriptors and weight.is_contiguous() and weight.dtype.itemsize == 2
    return whole and weight.data_ptr() % 16 == 0 and weight.shape[-1] % 8 == 0


def _boxes(matrix: torch.Tensor, lines: int, depth: int) -> TensorDescriptor:
    """For copies of ``lines`` times ``depth`` numbers; all matrices of a stack are one."""
    return TensorDescriptor.from_tensor(matrix.view(-1, matrix.shape[-1]), [lines, depth])


@triton.jit
def _tile_and_block(most, BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    """Which tile of rows and which block of columns are this program's."""
    within = tl.program_id(0) % (GROUP * BLOCKS)
    first = tl.program_id(0) // (GROUP * BLOCKS) * GROUP
    size = tl.minimum(most - first, GROUP)
    return first + within % size, within // size


@triton.jit
def _tile(pairs, counts, tiles, tokens, nth, TILE: tl.constexpr):
    """The expert of a tile, its pairs, and which of them are there; an expert of -1: there is no such tile."""
    expert = tl.load(tiles + nth * 2).to(tl.int64)
    first = tl.load(tiles + nth * 2 + 1, mask=expert >= 0, other=0)
    count = tl.load(counts + expert, mask=expert >= 0, other=0)
    place = first + tl.arange(0, TILE)
    inside = place < count
    return expert, tl.load(pairs + expert * tokens + place, mask=inside, other=0).to(tl.int64), inside


# Sizes that change with each step would otherwise be compiled for twice: as multiples of 16 and as others.
_ANY_SIZE = ["most", "tokens"]


@triton.jit(do_not_specialize=_ANY_SIZE)
def _up_products(
    x, weight, bias, out, pairs, counts, tiles,
    most, tokens, x_row, w_expert, w_column, w_depth, bias_expert, limit, alpha,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, TOP: tl.constexpr, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BOXES: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (INTER + COLUMNS - 1) // COLUMNS
    TYPE: tl.constexpr = out.dtype.element_ty
    nth, block = _tile_and_block(most, BLOCKS, GROUP)
    expert, pair, inside = _tile(pairs, counts, tiles, tokens, nth, TILE)
    if expert < 0:
        return
    first = block * COLUMNS
    depth = tl.arange(0, DEPTH)
    column = first + tl.arange(0, COLUMNS)
    x_at = x + (pair // TOP)[:, None] * x_row + depth[None, :]
    if BOXES:
        line = (expert * (2 * INTER)).to(tl.int32) + first
        gate = tl.zeros((TILE, COLUMNS), tl.float32)
        up = tl.zeros((TILE, COLUMNS), tl.float32)
        for k in tl.range(0, HIDDEN, DEPTH):
            a = tl.load(x_at + k, mask=inside[:, None] & (k + depth < HIDDEN)[None, :], other=0.0)
            gate = tl.dot(a, weight.load([line, k]).T, gate)
            up = tl.dot(a, weight.load([line + INTER, k]).T, up)
    elif INTERLEAVED:  # gate and up lie side by side, are multiplied as one and then taken apart
        weight += expert * w_expert
        both_column = 2 * first + tl.arange(0, 2 * COLUMNS)
        both_at = weight + both_column[None, :] * w_column + depth[:, None] * w_depth
        both = tl.zeros((TILE, 2 * COLUMNS), tl.float32)
        for k in tl.range(0, HIDDEN, DEPTH):
            deep = k + depth < HIDDEN
            a = tl.load(x_at + k, mask=inside[:, None] & deep[None, :], other=0.0)
            b = tl.load(both_at + k * w_depth, mask=deep[:, None] & (both_column < 2 * INTER)[None, :], other=0.0)
            both = tl.dot(a, b, both, input_precision="ieee")
        gate, up = tl.split(tl.reshape(both, (TILE, COLUMNS, 2)))
    else:
        gate_at = weight + expert * w_expert + column[None, :] * w_column + depth[:, None] * w_depth
        up_at = gate_at + INTER * w_column
        gate = tl.zeros((TILE, COLUMNS), tl.float32)
        up = tl.zeros((TILE, COLUMNS), tl.float32)
        for k in tl.range(0, HIDDEN, DEPTH):
            deep = k + depth < HIDDEN
            there = deep[:, None] & (column < INTER)[None, :]
            a = tl.load(x_at + k, mask=inside[:, None] & deep[None, :], other=0.0)
            gate = tl.dot(a, tl.load(gate_at + k * w_depth, mask=there, other=0.0), gate, input_precision="ieee")
            up = tl.dot(a, tl.load(up_at + k * w_depth, mask=there, other=0.0), up, input_precision="ieee")
    gate, up = _rounded(gate, TYPE), _rounded(up, TYPE)
    if bias is not None:
        step: tl.constexpr = 2 if INTERLEAVED else 1
        beyond: tl.constexpr = 1 if INTERLEAVED else INTER
        bias += expert * bias_expert + column * step
        gate = _rounded(gate + tl.load(bias, mask=column < INTER, other=0.0).to(tl.float32)[None, :], TYPE)
        up = _rounded(up + tl.load(bias + beyond, mask=column < INTER, other=0.0).to(tl.float32)[None, :], TYPE)
    made = _gated(gate, up, limit, alpha, ACTIVATION, LIMITED, TYPE)
    row = (nth * TILE + tl.arange(0, TILE)).to(tl.int64)
    tl.store(out + row[:, None] * INTER + column[None, :], made.to(TYPE), mask=(column < INTER)[None, :])


def up_products(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: RowsOfExperts,
    top: int,
    gating: Gating,
    tile: Tile | None = None,
) -> torch.Tensor:
    (tokens, hidden), inter = x.shape, weight.shape[1] // 2
    out = x.new_empty(len(rows.tiles) * rows.tile, inter)
    bias = None if bias is None else bias.contiguous()
    columns, depth, warps, stages = tile or tiles_for(tokens * top, len(weight), x.dtype).up
    boxes = not gating.interleaved and _in_boxes(weight)
    _up_products[(len(rows.tiles) * triton.cdiv(inter, columns),)](
        x, _boxes(weight, columns, depth) if boxes else weight, bias, out, rows.pairs, rows.counts, rows.tiles,
        len(rows.tiles), rows.pairs.stride(0), x.stride(0), *weight.stride(), 0 if bias is None else bias.stride(0),
        0.0 if gating.limit is None else gating.limit, gating.alpha,
        HIDDEN=hidden, INTER=inter, TOP=top, ACTIVATION=ACTIVATIONS.index(gating.activation),
        LIMITED=gating.limit is not None, INTERLEAVED=gating.interleaved, BOXES=boxes, GROUP=_GROUP, TILE=rows.tile,
        COLUMNS=columns, DEPTH=depth,
        num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=_ANY_SIZE)
def _down_products(
    made, weight, bias, out, pairs, counts, tiles,
    most, tokens, w_expert, w_column, w_depth, bias_expert,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, BOXES: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    TYPE: tl.constexpr = out.dtype.element_ty
    nth, block = _tile_and_block(most, BLOCKS, GROUP)
    expert, pair, inside = _tile(pairs, counts, tiles, tokens, nth, TILE)
    if expert < 0:
        return
    depth = tl.arange(0, DEPTH)
    first = block * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    row = nth * TILE
    result = tl.zeros((TILE, COLUMNS), tl.float32)
    if BOXES:
        line = (expert * HIDDEN).to(tl.int32) + first
        for k in tl.range(0, INTER, DEPTH):
            result = tl.dot(made.load([row, k]), weight.load([line, k]).T, result)
    else:
        made_at = made + (row + tl.arange(0, TILE)).to(tl.int64)[:, None] * INTER + depth[None, :]
        weight_at = weight + expert * w_expert + column[None, :] * w_column + depth[:, None] * w_depth
        for k in tl.range(0, INTER, DEPTH):
            deep = k + depth < INTER
            a = tl.load(made_at + k, mask=deep[None, :], other=0.0)
            b = tl.load(weight_at + k * w_depth, mask=deep[:, None] & (column < HIDDEN)[None, :], other=0.0)
            result = tl.dot(a, b, result, input_precision="ieee")
    if bias is not None:
        added = tl.load(bias + expert * bias_expert + column, mask=column < HIDDEN, other=0.0)
        result = _rounded(result, TYPE) + added.to(tl.float32)[None, :]
    at = out + pair[:, None] * HIDDEN + column[None, :]
    tl.store(at, result.to(TYPE), mask=inside[:, None] & (column < HIDDEN)[None, :])


def down_products(
    made: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: RowsOfExperts,
    tile: Tile | None = None,
) -> torch.Tensor:
    inter, hidden = made.shape[1], weight.shape[1]
    out = (made.new_empty if rows.whole else made.new_zeros)(rows.total, hidden)
    bias = None if bias is None else bias.contiguous()
    columns, depth, warps, stages = tile or tiles_for(rows.total, len(weight), made.dtype).down
    boxes = _in_boxes(weight)
    _down_products[(len(rows.tiles) * triton.cdiv(hidden, columns),)](
        _boxes(made, rows.tile, depth) if boxes else made, _boxes(weight, columns, depth) if boxes else weight, bias,
        out, rows.pairs, rows.counts, rows.tiles,
        len(rows.tiles), rows.pairs.stride(0), *weight.stride(), 0 if bias is None else bias.stride(0),
        HIDDEN=hidden, INTER=inter, BOXES=boxes, GROUP=_GROUP, TILE=rows.tile, COLUMNS=columns, DEPTH=depth,
        num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _sum_of_shares(
    made, shares, out, shares_row, shares_step, HIDDEN: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    for nth in tl.static_range(TOP):
        share = tl.load(shares + token * shares_row + nth * shares_step)
        result = tl.load(made + (token * TOP + nth) * HIDDEN + column, mask=inside, other=0.0)
        product = result.to(tl.float32) * share.to(tl.float32)
        if shares.dtype.element_ty == made.dtype.element_ty:  # else the product of tensors is in float32, too
            product = product.to(made.dtype.element_ty).to(tl.float32)
        total += product
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), mask=inside)


def sum_of_shares(made: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    (tokens, top), hidden = shares.shape, made.shape[1]
    out = made.new_empty(tokens, hidden)
    block = min(_SUM_BLOCK, triton.next_power_of_2(hidden))
    _sum_of_shares[(tokens, triton.cdiv(hidden, block))](
        made, shares, out, *shares.stride(), HIDDEN=hidden, TOP=top, BLOCK=block, enable_fp_fusion=False
    )
    return out
