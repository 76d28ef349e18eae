"""Attention in parts that end at fixed positions, in Triton: decode rows and prompts by the same kernel.

A block has some lines (query rows x the heads that share a KV head) and some of their parts, from fixed_lists.py. Each
part is computed from nothing, box by box, and folded into what comes before it. Boxes lie at multiples of their size in
the sequence, and a line hides what it does not see. A box that no line sees, or a part, changes nothing: not a bit. So
which rows stand beside a row, and which blocks compute its parts, make no difference to it, to the last bit. A block
that goes on where another has ended begins with what the launch of a larger tile has stored, in float32 as it was.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..cards import card_on
from ..lists.fixed_lists import FINISHED, FIXED_TILES, PART
from ..lists.work_lists import ITEM_FIELDS, WorkLists
from .pages_triton import LOG2E, block_of, boxes_of, in_log2, load_query, read_entry, store_lines

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_FINISHED = tl.constexpr(FINISHED)
_FEW_LINES = tl.constexpr(FIXED_TILES[0])  # of a block
_MERGED_HEADS = 4  # for each block of the merge
_SUMS = tl.constexpr(8)  # columns in which weights are added up: the fewest that a product may have


@triton.jit
def _fold(out, peak, total, acc, part_peak, part_total):
    """What a line has so far [M, V], [M], [M], and the next part of its keys.

    Which of two products is rounded before they are added is said here: a compiler may choose otherwise each time.
    """
    largest = tl.maximum(peak, part_peak)
    safe = tl.where(largest == float("-inf"), 0.0, largest)  # before a line has seen a key any finite number will do
    kept = tl.exp2(peak - safe)
    added = tl.exp2(part_peak - safe)
    out = tl.fma(out, tl.broadcast_to(kept[:, None], out.shape), acc * added[:, None])
    total = tl.fma(total, kept, part_total * added)
    return out, largest, total


@triton.jit
def _nothing(M: tl.constexpr, V: tl.constexpr):
    """What a line has before its first key: values, weights (in columns that are all the same), the largest score."""
    return (
        tl.zeros([M, V], tl.float32),
        tl.zeros([M, _SUMS], tl.float32),
        tl.full([M], float("-inf"), tl.float32),
    )


@triton.jit
def _next_part(out, peak, total, acc, part_total, part_peak, M: tl.constexpr, V: tl.constexpr):
    """Fold the part that is over, and begin the next one from nothing."""
    out, peak, total = _fold(out, peak, total, acc, part_peak, tl.max(part_total, 1))
    acc, part_total, part_peak = _nothing(M, V)
    return out, peak, total, acc, part_total, part_peak


@triton.jit
def _load_part_of_lines(
    part_out, part_sums, part_row, head, valid, HEADS: tl.constexpr, V_DIM: tl.constexpr
):  # fmt: skip
    """What an earlier launch has stored for each line: values [M, V], the sum of weights [M], the largest score [M]."""
    place = part_row.to(tl.int64) * HEADS + head
    at = tl.arange(0, block_of(V_DIM))
    inside = valid[:, None] & (at < V_DIM)[None, :]
    acc = tl.load(part_out + place[:, None] * V_DIM + at[None, :], mask=inside, other=0.0).to(tl.float32)
    total = tl.load(part_sums + 2 * place, mask=valid, other=0.0).to(tl.float32)
    peak = tl.load(part_sums + 2 * place + 1, mask=valid, other=float("-inf")).to(tl.float32)
    return acc, total, peak


@triton.jit
def _load_seen(
    pages,  # [pages, PAGE, KV_HEADS, DIM]
    page,
    offset,
    kv_head,
    seen,  # tokens of the box that are read
    BOX: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
):
    """A box of which the rest may hold a stale NaN: that is 0."""
    token = tl.arange(0, BOX)[:, None]
    at = tl.arange(0, block_of(DIM))[None, :]
    place = pages + ((page.to(tl.int64) * PAGE + offset + token) * KV_HEADS + kv_head) * DIM + at
    return tl.load(place, mask=(token < seen) & (at < DIM), other=0.0)


@triton.jit
def _add_box(
    acc, total, peak, query, k_box, v_box, position, line_length, hides, scale, softcap,
    BOX: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, over the keys from ``position`` on. ``hides``: some line does not see them all.

    Weights are added up as a product with ones: key by key, as their values are. A sum along a line would be taken in
    an order that depends on how many threads share the line.
    """
    scores = tl.dot(query, tl.trans(k_box), input_precision="ieee")
    factor = scale
    if SOFTCAP:  # ``in_log2`` made scale for the tanh, and softcap in units of log2; tanh(x) = 2 sigmoid(2x) - 1
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scale * scores) - 1.0)
        factor = 1.0
    if hides:
        key = position + tl.arange(0, BOX)
        visible = key[None, :] < line_length[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] >= line_length[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    largest = tl.maximum(peak, tl.max(scores, 1) * factor)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(scores * factor - safe[:, None]).to(v_box.dtype)
    shrink = tl.exp2(peak - safe)[:, None]
    ones = tl.full([BOX, _SUMS], 1.0, v_box.dtype)
    total = tl.dot(weights, ones, total * shrink, input_precision="ieee")
    acc = tl.dot(weights, v_box, acc * shrink, input_precision="ieee")
    return acc, total, largest


@triton.jit
def _attend_fixed(
    q,  # [rows, heads, QK_DIM]
    k_pages,  # [pages, PAGE, KV_HEADS, QK_DIM]
    v_pages,  # [pages, PAGE, KV_HEADS, V_DIM]
    k_boxes,  # the same by ``by_page``
    v_boxes,
    out,  # [rows, heads, V_DIM]
    part_out,  # [parts, heads, V_DIM] float32; not divided
    part_sums,  # [parts, heads, 2] float32: the sum of weights, and the largest score in log2
    items,  # tiles are launched from the largest down
    n_items,
    entries,
    row_parts,
    lengths,  # [rows]
    scale,
    softcap,
    BLOCK_M: tl.constexpr,
    SLICES: tl.constexpr,  # blocks for an item's lines
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PART: tl.constexpr,
    LONGEST_BOX: tl.constexpr,  # tokens of a box
    DESCRIPTORS: tl.constexpr,  # whether whole boxes are read by the copy engine
):
    BOXES: tl.constexpr = boxes_of(PAGE, LONGEST_BOX)
    BOX: tl.constexpr = PAGE // BOXES
    FEW: tl.constexpr = BLOCK_M <= _FEW_LINES
    kv_head = tl.program_id(0) % KV_HEADS
    item = tl.program_id(0) // KV_HEADS // SLICES
    first_line = tl.program_id(0) // KV_HEADS % SLICES * BLOCK_M
    record = items + item * _ITEM_FIELDS
    row = tl.load(record)
    rows = tl.load(record + 1)
    begin = tl.load(record + 2)
    end = tl.load(record + 4)
    part = tl.load(record + 5)
    is_own = tl.load(record + 6) == 1
    if (item >= tl.load(n_items)) | (first_line >= rows * GROUP):
        return
    page, _, first = read_entry(entries, begin)
    # The last row sees furthest. What is shared has been written, and a row that has ended changes nothing for others.
    reach = tl.where(is_own, tl.load(lengths + row + rows - 1), 1 << 30)
    tokens = tl.maximum(tl.minimum((end - begin) * PAGE, reach - first), 0)

    query, line_row, head, place, valid = load_query(
        q, row, rows, first_line, kv_head, BLOCK_M, GROUP, KV_HEADS, QK_DIM
    )
    line_row += row
    line_length = tl.load(lengths + line_row, mask=valid, other=0)  # [M]
    out_so_far = tl.zeros([BLOCK_M, block_of(V_DIM)], tl.float32)
    peak_so_far = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_so_far = tl.zeros([BLOCK_M], tl.float32)
    first_part = tl.load(row_parts + line_row, mask=valid, other=0) & (_FINISHED - 1)
    parts_before = tl.load(record + 3)
    carried = tl.load(record + 7)
    acc, total, peak = _nothing(BLOCK_M, block_of(V_DIM))
    # Blocks are short where lines are few: the first part before them and the carried one are waited for together. Of
    # more lines the registers do not hold both.
    if FEW:
        one, one_total, one_peak = _load_part_of_lines(
            part_out, part_sums, first_part, head, valid & (parts_before > 0), KV_HEADS * GROUP, V_DIM
        )
        acc, part_total, peak = _load_part_of_lines(
            part_out, part_sums, first_part + carried, head, valid & (carried >= 0), KV_HEADS * GROUP, V_DIM
        )
        total = tl.broadcast_to(part_total[:, None], [BLOCK_M, _SUMS])
        out_so_far, peak_so_far, total_so_far = _fold(out_so_far, peak_so_far, total_so_far, one, one_peak, one_total)
    for nth in tl.range(1 if FEW else 0, parts_before):
        one, one_total, one_peak = _load_part_of_lines(
            part_out, part_sums, first_part + nth, head, valid, KV_HEADS * GROUP, V_DIM
        )
        out_so_far, peak_so_far, total_so_far = _fold(out_so_far, peak_so_far, total_so_far, one, one_peak, one_total)
    if not FEW and carried >= 0:
        acc, part_total, peak = _load_part_of_lines(
            part_out, part_sums, first_part + carried, head, valid, KV_HEADS * GROUP, V_DIM
        )
        total = tl.broadcast_to(part_total[:, None], [BLOCK_M, _SUMS])
    seen_by_all = 0  # positions
    if not FEW and WINDOW == 0:
        seen_by_all = tl.min(tl.where(valid, line_length, 1 << 30))

    whole = 0
    if DESCRIPTORS:
        whole = tokens // BOX
        for i in tl.range(0, whole):
            next_page, _, _ = read_entry(entries, begin + tl.minimum((i + 1) // BOXES, end - begin - 1))
            position = first + i * BOX
            k_box = k_boxes.load([page, i % BOXES * BOX, kv_head, 0]).reshape(BOX, block_of(QK_DIM))
            v_box = v_boxes.load([page, i % BOXES * BOX, kv_head, 0]).reshape(BOX, block_of(V_DIM))
            if (position % PART == 0) & (i > 0):
                out_so_far, peak_so_far, total_so_far, acc, total, peak = _next_part(
                    out_so_far, peak_so_far, total_so_far, acc, total, peak, BLOCK_M, block_of(V_DIM)
                )
            acc, total, peak = _add_box(
                acc, total, peak, query, k_box, v_box, position, line_length, position + BOX > seen_by_all,
                scale, softcap, BOX, SOFTCAP, WINDOW,
            )  # fmt: skip
            page = next_page
    for i in tl.range(whole, tl.cdiv(tokens, BOX)):  # with descriptors at most one is left
        next_page, _, _ = read_entry(entries, begin + tl.minimum((i + 1) // BOXES, end - begin - 1))
        position = first + i * BOX
        seen = tokens - i * BOX
        k_box = _load_seen(k_pages, page, i % BOXES * BOX, kv_head, seen, BOX, QK_DIM, PAGE, KV_HEADS)
        v_box = _load_seen(v_pages, page, i % BOXES * BOX, kv_head, seen, BOX, V_DIM, PAGE, KV_HEADS)
        if (position % PART == 0) & (i > 0):
            out_so_far, peak_so_far, total_so_far, acc, total, peak = _next_part(
                out_so_far, peak_so_far, total_so_far, acc, total, peak, BLOCK_M, block_of(V_DIM)
            )
        acc, total, peak = _add_box(
            acc, total, peak, query, k_box, v_box, position, line_length, True,
            scale, softcap, BOX, SOFTCAP, WINDOW,
        )  # fmt: skip
        page = next_page
    out_so_far, peak_so_far, total_so_far = _fold(out_so_far, peak_so_far, total_so_far, acc, peak, tl.max(total, 1))

    if part < 0:
        divided = out_so_far / tl.where(total_so_far > 0, total_so_far, 1.0)[:, None]  # 0 for a line that saw no token
        store_lines(out, place, valid, divided, V_DIM)
    else:
        place = (first_part + part).to(tl.int64) * (KV_HEADS * GROUP) + head
        store_lines(part_out, place, valid, out_so_far, V_DIM)
        tl.store(part_sums + 2 * place, total_so_far, mask=valid)
        tl.store(part_sums + 2 * place + 1, peak_so_far, mask=valid)


@triton.jit
def _load_part(
    part_out, part_sums, part, end, head, at, inside, HEADS: tl.constexpr, V_DIM: tl.constexpr
):  # fmt: skip
    """The values, the largest score and the sum of weights of some heads in a part."""
    seen = part < end
    row = part * HEADS
    values = tl.load(part_out + row * V_DIM + at, mask=inside & seen, other=0.0)
    sums = part_sums + 2 * (row + head)
    total = tl.load(sums, mask=(head < HEADS) & seen, other=0.0)
    peak = tl.load(sums + 1, mask=(head < HEADS) & seen, other=float("-inf"))
    return values, peak, total


@triton.jit
def _merge_fixed(
    out,  # [rows, heads, V_DIM]
    part_out,  # [parts, heads, V_DIM] float32
    part_sums,  # [parts, heads, 2] float32
    row_parts,  # [rows + 1]
    sinks,  # [heads]
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0)
    begin = tl.load(row_parts + row).to(tl.int64)
    end = tl.load(row_parts + row + 1).to(tl.int64) & (_FINISHED - 1)
    if not SINKS and ((begin >= _FINISHED) | (end - begin == 1)):
        return  # an item has written the output
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, block_of(V_DIM))
    at = head[:, None] * V_DIM + dim[None, :]  # [H, D]
    inside = (head < HEADS)[:, None] & (dim < V_DIM)[None, :]
    acc = tl.zeros([BLOCK_H, block_of(V_DIM)], tl.float32)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for first in tl.range(begin, end, 4):  # their loads wait together; a part beyond the last changes nothing
        one = _load_part(part_out, part_sums, first, end, head, at, inside, HEADS, V_DIM)
        two = _load_part(part_out, part_sums, first + 1, end, head, at, inside, HEADS, V_DIM)
        three = _load_part(part_out, part_sums, first + 2, end, head, at, inside, HEADS, V_DIM)
        four = _load_part(part_out, part_sums, first + 3, end, head, at, inside, HEADS, V_DIM)
        acc, peak, total = _fold(acc, peak, total, one[0], one[1], one[2])
        acc, peak, total = _fold(acc, peak, total, two[0], two[1], two[2])
        acc, peak, total = _fold(acc, peak, total, three[0], three[1], three[2])
        acc, peak, total = _fold(acc, peak, total, four[0], four[1], four[2])
    if SINKS:  # logits without a value
        sink = tl.load(sinks + head, mask=head < HEADS, other=0.0).to(tl.float32) * LOG2E
        total += tl.exp2(sink - tl.where(peak == float("-inf"), 0.0, peak))
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + row.to(tl.int64) * (HEADS * V_DIM) + at, acc.to(out.dtype.element_ty), mask=inside)


def attend_fixed(
    tile: int,
    q: torch.Tensor,  # [rows, heads, qk_dim]
    k_pages: torch.Tensor,  # [pages, page_size, kv_heads, qk_dim]
    v_pages: torch.Tensor,  # [pages, page_size, kv_heads, v_dim]
    boxes: tuple[torch.Tensor | TensorDescriptor, torch.Tensor | TensorDescriptor],  # both by ``by_page``
    out: torch.Tensor,  # [rows, heads, v_dim]
    part_out: torch.Tensor,  # [parts, heads, v_dim] float32
    part_sums: torch.Tensor,  # [parts, heads, 2] float32
    work: WorkLists,
    lengths: torch.Tensor,  # [rows] int32  how many positions a row sees
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Run all items of one tile size."""
    items = work.items[tile]
    _, page_size, kv_heads, qk_dim = k_pages.shape
    v_dim = v_pages.shape[3]
    card = card_on(q.device)
    launch = card.parts(tile, max(qk_dim, v_dim), q.element_size())
    slices = triton.cdiv(tile, launch.lines)
    assert scale > 0, "the largest score is found before it is scaled"
    assert k_pages.is_contiguous() and v_pages.is_contiguous()
    # The copy engine reads whole boxes alone, and the last one would be fetched only when all others are done. Short
    # items would wait for it: loads that hide what a row does not see are fetched ahead, all of them.
    descriptors = card.descriptors and launch.lines > FIXED_TILES[0]
    scale, cap = in_log2(scale, softcap)
    _attend_fixed[(len(items) * slices * kv_heads,)](
        q, k_pages, v_pages, *boxes, out, part_out, part_sums,
        items, work.counts[tile], work.entries, work.row_parts, lengths, scale, cap,
        BLOCK_M=launch.lines, SLICES=slices, WINDOW=window or 0, SOFTCAP=softcap is not None,
        GROUP=q.shape[1] // kv_heads, KV_HEADS=kv_heads, PAGE=page_size, QK_DIM=qk_dim, V_DIM=v_dim, PART=PART,
        LONGEST_BOX=launch.box, DESCRIPTORS=descriptors, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


def merge_fixed(
    out: torch.Tensor,  # [rows, heads, v_dim]
    part_out: torch.Tensor,  # [parts, heads, v_dim] float32
    part_sums: torch.Tensor,  # [parts, heads, 2] float32
    work: WorkLists,
    *,
    sinks: torch.Tensor | None = None,  # [heads]
) -> None:
    """Fold each row's parts. With sinks the lists must have been built with ``direct=False``."""
    rows, heads, v_dim = out.shape
    _merge_fixed[(rows, triton.cdiv(heads, _MERGED_HEADS))](
        out, part_out, part_sums, work.row_parts, out if sinks is None else sinks,
        SINKS=sinks is not None, HEADS=heads, V_DIM=v_dim, BLOCK_H=_MERGED_HEADS, num_warps=1,
    )  # fmt: skip
