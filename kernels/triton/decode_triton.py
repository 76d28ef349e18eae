"""Decode attention over shared prefixes, in Triton: work lists, one attention kernel, one merge kernel.

A decode step is cut into *ranges*: some rows (neighbours in the batch) against the pages that they all read, either a
shared prefix or one row's own pages. A range becomes one or more *items*; one block per KV head computes an item. The
query rows of an item and the heads that share a KV head are packed into one tile, so that K and V are read once for all
of them. The same source is compiled for tiles of 16 and 64 lines. Each size has its own launch and its own list, and
the launches of a step may run side by side: they write to different places.

The lists say *which* pages to read; how far a row sees is read on the device, from ``lengths``. So lists stay valid
while rows grow, and one captured graph serves every mix of prefixes that fits their capacity. Partial results are
float32 and normalised, with the log2 of the softmax sum (LSE); the merge writes the output. Rows with a single part
skip the merge. How pages are read is in pages_triton.py; the figures behind the choices are in docs/attention-notes.md.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..cards import card_on
from ..lists.work_lists import ITEM_FIELDS, WorkLists
from .pages_triton import (
    LOG2E,
    attend_box,
    block_of,
    boxes_of,
    by_page,
    in_log2,
    load_query,
    read_entry,
    store_lines,
)

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)

MERGE_HEADS, MERGE_PARTS = 4, 8  # for each block, of one warp: no sum crosses warps


@triton.jit
def _attend_items(
    q,  # [rows, heads, QK_DIM]
    k_pages,  # [pages, PAGE, KV_HEADS, QK_DIM], by ``by_page``
    v_pages,  # [pages, PAGE, KV_HEADS, V_DIM], by ``by_page``
    out,  # [rows, heads, V_DIM]
    part_out,  # [parts, heads, V_DIM] float32
    part_lse,  # [parts, heads] float32, log2
    items,
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
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    LONGEST_BOX: tl.constexpr,  # tokens of a box
    DESCRIPTORS: tl.constexpr,  # whether K and V are descriptors
):
    BOXES: tl.constexpr = boxes_of(PAGE, LONGEST_BOX)
    BOX: tl.constexpr = PAGE // BOXES
    # The heads of an item are neighbours in the grid: together they read whole rows of the cache.
    kv_head = tl.program_id(0) % KV_HEADS
    item = tl.program_id(0) // KV_HEADS // SLICES
    first_line = tl.program_id(0) // KV_HEADS % SLICES * BLOCK_M
    record = items + item * _ITEM_FIELDS
    row = tl.load(record)
    rows = tl.load(record + 1)
    begin = tl.load(record + 2)
    full = tl.load(record + 3)
    end = tl.load(record + 4)
    part = tl.load(record + 5)
    alone = rows == 1
    last = row
    if CAUSAL:
        alone |= tl.load(record + 6) == 1
        last += rows - 1
    # Checked after the record is loaded, so that all these loads are under way together.
    if (item >= tl.load(n_items)) | (first_line >= rows * GROUP):
        return
    page, _, _ = read_entry(entries, begin)
    # Rows of different units share only complete prefixes: no length bounds the reading, and a row that has ended (its
    # length is 0) changes nothing for the others. Rows of one unit see up to the last row's end.
    length = tl.where(alone, tl.load(lengths + last), 1 << 30)
    # A row that has ended reads nothing: the list may hold pages of its own that it has never written.
    end = tl.where(length > 0, end, begin)
    full = tl.minimum(full, end)

    query, line_row, head, place, valid = load_query(
        q, row, rows, first_line, kv_head, BLOCK_M, GROUP, KV_HEADS, QK_DIM
    )
    line_row += row
    # Read here, though needed at the end: short items would wait for it then.
    part_row = tl.load(row_parts + line_row, mask=valid & (part >= 0), other=0) + part
    line_length = line_row  # ignored without CAUSAL and WINDOW
    if CAUSAL or WINDOW > 0:
        line_length = tl.load(lengths + line_row, mask=valid, other=0)  # [M]
    acc = tl.zeros([BLOCK_M, block_of(V_DIM)], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # A page's entry is read one turn ahead: if the address needed a load of the same turn, nothing would be prefetched.
    for i in tl.range(begin * BOXES, full * BOXES):
        next_page, _, _ = read_entry(entries, tl.minimum((i + 1) // BOXES, end - 1))
        acc, peak, total = attend_box(
            acc, peak, total, query, k_pages, v_pages, page, 0, 0, i % BOXES * BOX, 0, 0, 0, False,
            kv_head, scale, softcap, BOX, QK_DIM, V_DIM, SOFTCAP, CAUSAL, WINDOW, True,
            PAGE, KV_HEADS, DESCRIPTORS,
        )  # fmt: skip
        page = next_page
    _, tokens, first = read_entry(entries, tl.maximum(tl.minimum(full, end - 1), begin))
    for i in tl.range(full * BOXES, end * BOXES):
        next_page, next_tokens, next_first = read_entry(entries, tl.minimum((i + 1) // BOXES, end - 1))
        # Only its length bounds a row's view of its own pages: the list may hold pages that it has yet to reach.
        acc, peak, total = attend_box(
            acc, peak, total, query, k_pages, v_pages, page, tokens, first, i % BOXES * BOX, length,
            line_length - WINDOW, line_length, True,
            kv_head, scale, softcap, BOX, QK_DIM, V_DIM, SOFTCAP, CAUSAL, WINDOW, False,
            PAGE, KV_HEADS, DESCRIPTORS,
        )  # fmt: skip
        page, tokens, first = next_page, next_tokens, next_first

    # A line that saw no token gets output 0 and LSE -inf.
    divisor = tl.where(total > 0, total, 1.0)
    acc = acc / divisor[:, None]
    if part < 0:
        store_lines(out, place, valid, acc, V_DIM)
    else:
        lse = tl.where(total > 0, peak + tl.log2(divisor), float("-inf"))
        place = part_row.to(tl.int64) * (KV_HEADS * GROUP) + head
        store_lines(part_out, place, valid, acc, V_DIM)
        tl.store(part_lse + place, lse, mask=valid)


@triton.jit
def _merge_parts(
    out,  # [rows, heads, V_DIM]
    part_out,  # [parts, heads, V_DIM] float32
    part_lse,  # [parts, heads] float32, log2
    row_parts,  # [rows + 1]
    sinks,  # [heads]
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    V_BLOCK: tl.constexpr = triton.next_power_of_2(V_DIM)
    row = tl.program_id(0)
    begin = tl.load(row_parts + row)
    end = tl.load(row_parts + row + 1)
    if not SINKS and end - begin == 1:
        return  # its only item has written the output
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, V_BLOCK)
    at = head[:, None] * V_DIM + dim[None, :]  # [H, D]
    inside = (head < HEADS)[:, None] & (dim < V_DIM)[None, :]
    acc = tl.zeros([BLOCK_H, V_BLOCK], tl.float32)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    if SINKS:  # a logit without a value
        peak = tl.load(sinks + head, mask=head < HEADS, other=0.0).to(tl.float32) * LOG2E
        total = tl.full([BLOCK_H], 1.0, tl.float32)
    for start in tl.range(begin, end, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        live = (part < end)[:, None] & (head < HEADS)[None, :]  # [P, H]
        part = part.to(tl.int64)[:, None]
        lse = tl.load(part_lse + part * HEADS + head[None, :], mask=live, other=float("-inf"))
        where = (part * (HEADS * V_DIM))[:, :, None] + at[None]  # [P, H, D]
        values = tl.load(part_out + where, mask=live[:, :, None] & inside[None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(lse - safe[None, :])
        shrink = tl.exp2(peak - safe)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        peak = new_peak
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + row.to(tl.int64) * (HEADS * V_DIM) + at, acc.to(out.dtype.element_ty), mask=inside)


def attend_items(
    tile: int,
    q: torch.Tensor,  # [rows, heads, qk_dim]
    k_pages: torch.Tensor | TensorDescriptor,  # [pages, page_size, kv_heads, qk_dim]; a descriptor is by ``by_page``
    v_pages: torch.Tensor | TensorDescriptor,  # [pages, page_size, kv_heads, v_dim]
    out: torch.Tensor,  # [rows, heads, v_dim]
    part_out: torch.Tensor,  # [parts, heads, v_dim] float32
    part_lse: torch.Tensor,  # [parts, heads] float32
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
    launch = card.decode(tile, max(qk_dim, v_dim), q.element_size(), work.brief)
    slices = triton.cdiv(tile, launch.lines)
    assert scale > 0, "the largest score is found before it is scaled"
    scale, cap = in_log2(scale, softcap)
    _attend_items[(len(items) * slices * kv_heads,)](
        q, by_page(k_pages), by_page(v_pages), out, part_out, part_lse,
        items, work.counts[tile], work.entries, work.row_parts, lengths, scale, cap,
        BLOCK_M=launch.lines, SLICES=slices, WINDOW=window or 0, SOFTCAP=softcap is not None, CAUSAL=work.causal,
        GROUP=q.shape[1] // kv_heads, KV_HEADS=kv_heads, PAGE=page_size, QK_DIM=qk_dim, V_DIM=v_dim,
        LONGEST_BOX=launch.box, DESCRIPTORS=card.descriptors, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


def merge_parts(
    out: torch.Tensor,  # [rows, heads, v_dim]
    part_out: torch.Tensor,  # [parts, heads, v_dim] float32
    part_lse: torch.Tensor,  # [parts, heads] float32
    work: WorkLists,
    *,
    sinks: torch.Tensor | None = None,  # [heads]
) -> None:
    """Join each row's parts. With sinks the lists must have been built with ``direct=False``."""
    rows, heads, v_dim = out.shape
    _merge_parts[(rows, triton.cdiv(heads, MERGE_HEADS))](
        out, part_out, part_lse, work.row_parts, out if sinks is None else sinks,
        SINKS=sinks is not None, HEADS=heads, V_DIM=v_dim, BLOCK_H=MERGE_HEADS, BLOCK_P=MERGE_PARTS, num_warps=1,
    )  # fmt: skip
