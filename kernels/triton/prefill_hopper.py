"""Prefill attention for Hopper cards, in Gluon: the work of prefill_triton.py, put in order by hand.

A block stays on its multiprocessor and takes one item after the other. One of its warps only copies: it runs ahead
through the pages, into the next item's. Groups of four warps, the *sides*, each compute 64 lines of the item against
the same pages, which are thus read from L2 once for all sides. A side multiplies the weights of one page with its V
while it turns the scores of the next page into weights; while it waits, the tensor cores work for the other sides.

Gluon is Triton's lower language: layouts, copies, barriers and waits are written out. Triton's interpreter does not run
it, so the kernel in prefill_triton.py stays: for other cards, other shapes, float32, and steps too small to fill the
card in this way. The figures are in docs/attention-notes.md.
"""

from __future__ import annotations

import torch

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools import tensor_descriptor

from ..cards import BOX_OF_DESCRIPTORS
from ..lists.work_lists import CHUNK_FIELDS, ENTRY_FIELDS, PrefillWork
from .pages_triton import block_of, boxes_of, by_page

_CHUNK_FIELDS = gl.constexpr(CHUNK_FIELDS)
_ENTRY_FIELDS = gl.constexpr(ENTRY_FIELDS)
_LONGEST_BOX = gl.constexpr(BOX_OF_DESCRIPTORS)
_LOG2E = gl.constexpr(1.4426950408889634)
_together = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name before Triton 3.7
# The second is its name before Triton 3.9.
_tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

LINES = 64  # of a side
_SHARED = 227 * 1024 - 2048  # bytes that a block may have, less room for barriers and the division into sides
_MOST_STAGES = 4
_GLUON = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def sides(qk_dim: int, v_dim: int) -> int:
    """The sides of a block: three where a third of the registers is enough for each."""
    return 3 if max(qk_dim, v_dim) <= 128 else 2


def takes(qk_dim: int, v_dim: int, itemsize: int) -> bool:
    """Whether this kernel is the faster one for heads of these dims. Heads of 64 fill a multiprocessor without it."""
    return itemsize == 2 and min(qk_dim, v_dim) > 64


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _forth_and_back(t, total, grid):
    """The item of turn ``t``. Dealt out in one direction only, the first block would get the longest of each round."""
    turn = t // grid
    back = (turn % 2 == 1) & ((turn + 1) * grid <= total)
    return gl.where(back, (2 * turn + 1) * grid - 1 - t, t)


@gluon.jit
def _tokens_and_first(entries, at):
    return gl.load(entries + at * _ENTRY_FIELDS + 1), gl.load(entries + at * _ENTRY_FIELDS + 2)


@gluon.jit
def _box_start(seen, offset, BOX: gl.constexpr):
    """See pages_triton.py."""
    return gl.minimum(gl.maximum(seen, 0), offset + BOX) - BOX


@gluon.jit
def _copy_pages(
    k_pages, v_pages, items, n_items, entries, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty,
    STAGES: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr, KV_HEADS: gl.constexpr,
):  # fmt: skip
    """Copy all boxes of all items of the block, each as soon as the sides have read the box in its place."""
    grid = gl.num_programs(0)
    total = gl.load(n_items) * KV_HEADS
    turn = 0  # boxes so far
    for t in range(gl.program_id(0), total, grid):
        nth = _forth_and_back(t, total, grid)
        kv_head = nth % KV_HEADS
        record = items + nth // KV_HEADS * _CHUNK_FIELDS
        reach = gl.load(record + 1) + gl.load(record + 2)
        short = gl.load(record + 3)
        shorts = gl.load(record + 4)
        rest = gl.load(record + 5)
        pages = gl.load(record + 8)
        at = gl.where(shorts > 0, short, rest)
        page = gl.load(entries + at * _ENTRY_FIELDS)
        tokens, first = _tokens_and_first(entries, at)
        for i in range(pages * BOXES):
            ahead = gl.minimum((i + 1) // BOXES, pages - 1)
            at = ahead + gl.where(ahead < shorts, short, rest)
            next_page = gl.load(entries + at * _ENTRY_FIELDS)
            next_tokens, next_first = _tokens_and_first(entries, at)
            start = _box_start(gl.minimum(tokens, reach - first), i % BOXES * BOX, BOX)
            stage = turn % STAGES
            used = (turn // STAGES + 1) & 1  # a fresh barrier counts as past its second phase
            mbarrier.wait(k_empty.index(stage), used)
            mbarrier.expect(k_full.index(stage), k_pages.block_type.nbytes)
            _tma_load(k_pages, [page, start, kv_head, 0], k_full.index(stage), k_boxes.index(stage))
            mbarrier.wait(v_empty.index(stage), used)
            mbarrier.expect(v_full.index(stage), v_pages.block_type.nbytes)
            _tma_load(v_pages, [page, start, kv_head, 0], v_full.index(stage), v_boxes.index(stage))
            page = next_page
            tokens = next_tokens
            first = next_first
            turn += 1


@gluon.jit
def _places(
    row, rows, kv_head, LINES: gl.constexpr, FIRST: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """For a side's lines: the place of each element in [rows, heads, dim], and whether the item has it."""
    line = FIRST + gl.arange(0, LINES, gl.SliceLayout(1, LAYOUT))
    place = (row + line // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + line % GROUP
    at = gl.arange(0, block_of(DIM), gl.SliceLayout(0, LAYOUT))
    return place[:, None] * DIM + at[None, :], (line // GROUP < rows)[:, None] & (at < DIM)[None, :]


@gluon.jit
def _lines(
    q, row, rows, kv_head, LINES: gl.constexpr, FIRST: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    place, inside = _places(row, rows, kv_head, LINES, FIRST, GROUP, KV_HEADS, DIM, LAYOUT)
    return gl.load(q + place, mask=inside, other=0.0)


@gluon.jit
def _weigh(
    scores,  # [M, BOX], not multiplied by scale yet
    peak,
    total,
    scale,
    softcap,
    hides,  # whether some line does not see all of the box
    seen,  # tokens of the page that some line sees
    offset,
    sees,  # [M]
    SOFTCAP: gl.constexpr,
    WINDOW: gl.constexpr,
    BOX: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """One step of the online softmax, without the sum over V: see pages_triton.py."""
    factor = scale
    if SOFTCAP:
        factor = 1.0
        scores = softcap * (2.0 / (1.0 + gl.exp2(-2.0 * _LOG2E * scale * scores)) - 1.0)
    if hides:
        token = _box_start(seen, offset, BOX) + gl.arange(0, BOX, gl.SliceLayout(0, LAYOUT))
        visible = (token >= offset)[None, :] & (token[None, :] < sees[:, None])
        if WINDOW > 0:
            visible = visible & (token[None, :] >= sees[:, None] - WINDOW)
        scores = gl.where(visible, scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.reduce(scores, 1, _larger) * factor)
    safe = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = gl.exp2(scores * factor - safe[:, None])
    shrink = gl.exp2(peak - safe)
    return weights, shrink, new_peak, total * shrink + gl.reduce(weights, 1, _add)


@gluon.jit
def _attend(
    q, out, items, n_items, entries, sinks, scale, softcap, queries, k_boxes, v_boxes, k_full, k_empty, v_full,
    v_empty, SIDE: gl.constexpr, LINES: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, QK_DIM: gl.constexpr, V_DIM: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """The work of one side."""
    QK: gl.constexpr = block_of(QK_DIM)
    V: gl.constexpr = block_of(V_DIM)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BOX, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // QK, QK // 8], [4, 1], [1, 0])
    FIRST: gl.constexpr = SIDE * LINES
    line = FIRST + gl.arange(0, LINES, gl.SliceLayout(1, SCORES))
    line_row = line // GROUP
    nothing = gl.full([LINES, BOX], 0.0, gl.float32, SCORES)
    grid = gl.num_programs(0)
    n_blocks = gl.load(n_items) * KV_HEADS
    query = queries.index(SIDE)

    nth = gl.program_id(0)
    row = gl.load(items + nth // KV_HEADS * _CHUNK_FIELDS, mask=nth < n_blocks, other=0)
    rows = gl.load(items + nth // KV_HEADS * _CHUNK_FIELDS + 1, mask=nth < n_blocks, other=0)
    query.store(_lines(q, row, rows, nth % KV_HEADS, LINES, FIRST, GROUP, KV_HEADS, QK_DIM, QUERY))
    fence_async_shared()
    _together()
    turn = 0  # boxes so far
    for t in range(gl.program_id(0), n_blocks, grid):
        kv_head = nth % KV_HEADS
        record = items + nth // KV_HEADS * _CHUNK_FIELDS
        position = gl.load(record + 2)
        short = gl.load(record + 3)
        shorts = gl.load(record + 4)
        rest = gl.load(record + 5)
        full_from = gl.load(record + 6) * BOXES
        full_to = gl.load(record + 7) * BOXES
        pages = gl.load(record + 8)
        more = t + grid < n_blocks
        next_nth = _forth_and_back(t + grid, n_blocks, grid)
        next_row = gl.load(items + next_nth // KV_HEADS * _CHUNK_FIELDS, mask=more, other=0)
        next_rows = gl.load(items + next_nth // KV_HEADS * _CHUNK_FIELDS + 1, mask=more, other=0)
        turns = pages * BOXES
        acc = gl.full([LINES, V], 0.0, gl.float32, ACC)
        peak = gl.full([LINES], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.full([LINES], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
        if SINKS:  # a logit without a value
            head = kv_head * GROUP + line % GROUP
            peak = gl.load(sinks + head, mask=line_row < rows, other=0.0).to(gl.float32) * _LOG2E
            total = gl.full([LINES], 1.0, gl.float32, gl.SliceLayout(1, SCORES))

        tokens, first = _tokens_and_first(entries, gl.where(shorts > 0, short, rest))
        stage = turn % STAGES
        mbarrier.wait(k_full.index(stage), turn // STAGES & 1)
        k_box = k_boxes.index(stage).reshape([BOX, QK]).permute((1, 0))
        scores = warpgroup_mma(query, k_box, nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, [scores])
        _together()
        mbarrier.arrive(k_empty.index(stage), count=1)
        hides = (full_from > 0) | (full_to <= 0)
        seen = gl.minimum(tokens, position + rows - first)
        weights, shrink, peak, total = _weigh(
            scores, peak, total, scale, softcap, hides, seen, 0, position + line_row + 1 - first,
            SOFTCAP, WINDOW, BOX, SCORES,
        )  # fmt: skip
        rounded = gl.convert_layout(weights.to(q.dtype.element_ty), WEIGHTS)

        ahead = gl.minimum(1 // BOXES, pages - 1)
        tokens, first = _tokens_and_first(entries, ahead + gl.where(ahead < shorts, short, rest))
        mbarrier.wait(k_full.index((turn + 1) % STAGES), (turn + 1) // STAGES & 1, pred=turns > 1)
        for i in range(1, turns):
            ahead = gl.minimum((i + 1) // BOXES, pages - 1)
            next_tokens, next_first = _tokens_and_first(entries, ahead + gl.where(ahead < shorts, short, rest))
            before = turn % STAGES
            before_phase = turn // STAGES & 1
            turn += 1
            stage = turn % STAGES
            k_box = k_boxes.index(stage).reshape([BOX, QK]).permute((1, 0))
            scores = warpgroup_mma(query, k_box, nothing, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), before_phase)
            acc = warpgroup_mma(rounded, v_boxes.index(before).reshape([BOX, V]), acc, is_async=True)
            scores = warpgroup_mma_wait(1, [scores])  # the second product goes on
            _together()
            mbarrier.arrive(k_empty.index(stage), count=1)
            hides = (i < full_from) | (i >= full_to)
            seen = gl.minimum(tokens, position + rows - first)
            weights, shrink, peak, total = _weigh(
                scores, peak, total, scale, softcap, hides, seen, i % BOXES * BOX, position + line_row + 1 - first,
                SOFTCAP, WINDOW, BOX, SCORES,
            )  # fmt: skip
            # This wait is a branch, and so divides the code. Without it the assembler would move the softmax behind
            # the next wait, and the product would run alone. The weights pass through that next wait for the same
            # reason: they are rounded into registers that the running product still reads.
            mbarrier.wait(k_full.index((turn + 1) % STAGES), (turn + 1) // STAGES & 1, pred=i + 1 < turns)
            acc, weights = warpgroup_mma_wait(0, [acc, weights])
            _together()
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, ACC))[:, None]
            rounded = gl.convert_layout(weights.to(q.dtype.element_ty), WEIGHTS)
            tokens = next_tokens
            first = next_first
        stage = turn % STAGES
        mbarrier.wait(v_full.index(stage), turn // STAGES & 1)
        acc = warpgroup_mma(rounded, v_boxes.index(stage).reshape([BOX, V]), acc, is_async=True)
        turn += 1
        # The next item's query is under way while this one ends.
        next_query = _lines(q, next_row, next_rows, next_nth % KV_HEADS, LINES, FIRST, GROUP, KV_HEADS, QK_DIM, QUERY)
        acc = warpgroup_mma_wait(0, [acc])
        _together()
        mbarrier.arrive(v_empty.index(stage), count=1)
        query.store(next_query)
        fence_async_shared()
        acc = acc * (1.0 / gl.convert_layout(total, gl.SliceLayout(1, ACC)))[:, None]  # never 0: a row sees itself
        place, inside = _places(row, rows, kv_head, LINES, FIRST, GROUP, KV_HEADS, V_DIM, ACC)
        gl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)
        _together()
        nth = next_nth
        row = next_row
        rows = next_rows


@gluon.jit
def _attend_chunks(
    q,  # [rows, heads, QK_DIM]
    k_pages,  # [pages, PAGE, KV_HEADS, QK_DIM], a descriptor
    v_pages,  # [pages, PAGE, KV_HEADS, V_DIM], a descriptor
    out,  # [rows, heads, V_DIM]
    items,
    n_items,
    entries,
    sinks,  # [heads]
    scale,
    softcap,
    LINES: gl.constexpr,
    SIDES: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a side's thread
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    QK_DIM: gl.constexpr,
    V_DIM: gl.constexpr,
):
    BOXES: gl.constexpr = boxes_of(PAGE, _LONGEST_BOX)
    BOX: gl.constexpr = PAGE // BOXES
    DTYPE: gl.constexpr = q.dtype.element_ty
    QUERY: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LINES, block_of(QK_DIM)], DTYPE)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(DTYPE, [SIDES, LINES, block_of(QK_DIM)], QUERY)
    k_boxes = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BOX, 1, block_of(QK_DIM)], k_pages.layout)
    v_boxes = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BOX, 1, block_of(V_DIM)], v_pages.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=SIDES)
        mbarrier.init(v_empty.index(i), count=SIDES)
    # The sides, then the warp that copies. In one expression: in a tuple with a name, constants would become values.
    gl.warp_specialize(
        [
            (_attend, (
                q, out, items, n_items, entries, sinks, scale, softcap,
                queries, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty,
                worker, LINES, STAGES, BOX, BOXES, GROUP, KV_HEADS, QK_DIM, V_DIM, WINDOW, SOFTCAP, SINKS,
            )) if worker < SIDES else (_copy_pages, (
                k_pages, v_pages, items, n_items, entries, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty,
                STAGES, BOX, BOXES, KV_HEADS,
            ))
            for worker in (0, 1, 2, 3)[: SIDES + 1]
        ],
        [4, 4, 1][3 - SIDES :],  # the first side has the block's own warps
        [REGISTERS, REGISTERS, 24][3 - SIDES :],
    )  # fmt: skip


def _pages(pages: torch.Tensor | tensor_descriptor.TensorDescriptor) -> TensorDescriptor:
    """The descriptor of ``by_page``, with Gluon's layout."""
    made = by_page(pages)
    assert isinstance(made, tensor_descriptor.TensorDescriptor)
    layout = gl.NVMMASharedLayout.get_default_for(made.block_shape, _GLUON[made.base.dtype])
    return TensorDescriptor(made.base, made.shape, made.strides, made.block_shape, layout)


def attend_chunks(
    q: torch.Tensor,  # [rows, heads, qk_dim]
    k_pages: torch.Tensor | tensor_descriptor.TensorDescriptor,  # as for prefill_triton.py
    v_pages: torch.Tensor | tensor_descriptor.TensorDescriptor,
    out: torch.Tensor,  # [rows, heads, v_dim]
    work: PrefillWork,  # of tiles with the lines of all sides
    scale: float,  # as ``in_log2`` makes them
    softcap: float,
    *,
    blocks: int,  # at most: the device's multiprocessors
    window: int,  # 0: none
    caps: bool,
    sinks: torch.Tensor | None,
) -> None:
    _, page_size, kv_heads, qk_dim = k_pages.shape
    v_dim = v_pages.shape[3]
    side_count = sides(qk_dim, v_dim)
    assert work.tile == LINES * side_count
    box = page_size // boxes_of(page_size, BOX_OF_DESCRIPTORS)
    room = _SHARED - side_count * LINES * block_of(qk_dim) * 2
    stages = min(_MOST_STAGES, room // (box * (block_of(qk_dim) + block_of(v_dim)) * 2))
    _attend_chunks[(min(blocks, len(work.items) * kv_heads),)](
        q, _pages(k_pages), _pages(v_pages), out,
        work.items, work.count, work.entries, out if sinks is None else sinks, scale, softcap,
        LINES=LINES, SIDES=side_count, STAGES=stages, REGISTERS=160 if side_count == 3 else 240,
        WINDOW=window, SOFTCAP=caps, SINKS=sinks is not None,
        GROUP=q.shape[1] // kv_heads, KV_HEADS=kv_heads, PAGE=page_size, QK_DIM=qk_dim, V_DIM=v_dim,
        num_warps=4,
    )  # fmt: skip
