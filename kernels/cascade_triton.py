"""Decode attention over shared prefixes, in Triton: work lists, one attention kernel, one merge kernel.

A decode step is cut into *ranges*: some rows (neighbours in the batch) against the pages that they all read, be it a
shared prefix or what one row owns. A range becomes one or more *items*; an item is what one block per KV head does.
The query rows of an item and the heads that share a KV head are packed into one tile of ``BLOCK_M`` lines, so that K
and V are read once for all of them. The same source is compiled for tiles of 16 and 64 lines; each is a launch of its
own with a list of its own, and the launches of a step may run side by side: they write to different places.

The lists say *what* to do; how far a row sees is read on the device, from ``lengths``. So lists stay valid while rows
grow, and one captured graph serves every mix of prefixes that fits their capacity. A page is one tile of keys. Partial
results are float32 and normalised, with the log2 of the softmax sum (LSE); the merge writes the output. A row with a
single part skips it. The figures behind the choices are in docs/attention-notes.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .work_lists import ENTRY_FIELDS, ITEM_FIELDS, WorkLists

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_ENTRY_FIELDS = tl.constexpr(ENTRY_FIELDS)
_LOG2E = tl.constexpr(1.4426950408889634)


# Small blocks, several to a multiprocessor, for the short items; room to fetch ahead where a page is more work.
LAUNCHES = {16: {"num_warps": 2, "num_stages": 2}, 64: {"num_warps": 4, "num_stages": 3}}
MERGE_HEADS, MERGE_PARTS = 4, 8  # for each block, of one warp: no sum crosses warps


@triton.jit
def _meet_page(
    acc,  # [M, V] float32
    peak,  # [M]  the largest score so far, times scale
    total,  # [M]  sum of exp2(score - peak)
    query,  # [M, QK]
    k_pages,
    v_pages,
    kv_head,
    page,
    seen,  # how many of the page's tokens the item's first row sees
    first,
    sees_from,  # [M]  with a window: the first position that a line sees
    scale,
    softcap,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE: tl.constexpr,
    QK_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    """One step of the online softmax: one page of keys for all lines of a tile."""
    token = tl.arange(0, PAGE)
    start = 0
    if MASK:
        # Keys may stand anywhere in the tile, so the box is moved up until it ends with the last token that is seen.
        # What sticks out of the page comes as zeros, and costs no bytes. Beyond that token a page may hold a stale
        # NaN, and 0 x NaN is NaN: masks on the scores alone would not do.
        start = tl.minimum(tl.maximum(seen, 0), PAGE) - PAGE
        token += start
    k_page = k_pages.load([page, start, kv_head, 0]).reshape(PAGE, QK_BLOCK)
    v_page = v_pages.load([page, start, kv_head, 0]).reshape(PAGE, V_BLOCK)
    scores = tl.dot(query, tl.trans(k_page), input_precision="ieee")  # [M, PAGE]
    factor = scale
    if SOFTCAP:  # scale is what the tanh wants, softcap is in units of log2; tanh(x) = 2 sigmoid(2x) - 1
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scale * scores) - 1.0)
        factor = 1.0
    if MASK:
        scores = tl.where((token >= 0)[None, :], scores, float("-inf"))
        if WINDOW > 0:
            scores = tl.where((first + token)[None, :] >= sees_from[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    safe = new_peak
    if MASK:  # a line that has seen nothing yet: any finite number does for its peak, and avoids inf - inf
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * factor - safe[:, None])
    shrink = tl.exp2(peak - safe)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v_page.dtype), v_page, acc * shrink[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def _attend_items(
    q,  # [rows, heads, QK_DIM]
    k_pages,  # [pages, PAGE, KV_HEADS, QK_DIM], a descriptor
    v_pages,  # [pages, PAGE, KV_HEADS, V_DIM], a descriptor
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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
):
    QK_BLOCK: tl.constexpr = triton.next_power_of_2(QK_DIM)
    V_BLOCK: tl.constexpr = triton.next_power_of_2(V_DIM)
    # The heads of an item are neighbours in the grid: together they read whole rows of the cache.
    kv_head = tl.program_id(0) % KV_HEADS
    item = tl.program_id(0) // KV_HEADS
    record = items + item * _ITEM_FIELDS
    row = tl.load(record)
    rows = tl.load(record + 1)
    begin = tl.load(record + 2)
    full = tl.load(record + 3)
    end = tl.load(record + 4)
    part = tl.load(record + 5)
    if item >= tl.load(n_items):  # after the record, so that all these loads are under way together
        return
    page = tl.load(entries + begin * _ENTRY_FIELDS)
    length = tl.load(lengths + row)
    length = tl.where(rows == 1, length, 1 << 30)  # what several rows read is behind all of them

    line = tl.arange(0, BLOCK_M)
    valid = line < rows * GROUP
    line_row = row + line // GROUP
    head = kv_head * GROUP + line % GROUP
    place = line_row.to(tl.int64) * (KV_HEADS * GROUP) + head  # [M]
    at = tl.arange(0, QK_BLOCK)
    query = tl.load(q + place[:, None] * QK_DIM + at[None, :], mask=valid[:, None] & (at < QK_DIM)[None, :], other=0.0)
    sees_from = line
    if WINDOW > 0:
        sees_from = tl.load(lengths + line_row, mask=valid, other=0) - WINDOW
    acc = tl.zeros([BLOCK_M, V_BLOCK], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # A page's entry is read one turn ahead: with a load of the same turn in the address, nothing would be prefetched.
    for i in tl.range(begin, full):
        next_page = tl.load(entries + tl.minimum(i + 1, end - 1) * _ENTRY_FIELDS)
        acc, peak, total = _meet_page(
            acc, peak, total, query, k_pages, v_pages, kv_head, page, PAGE, 0, sees_from, scale, softcap,
            False, WINDOW, SOFTCAP, PAGE, QK_BLOCK, V_BLOCK,
        )  # fmt: skip
        page = next_page
    entry = entries + tl.minimum(full, end - 1) * _ENTRY_FIELDS
    tokens = tl.load(entry + 1)
    first = tl.load(entry + 2)
    for i in tl.range(full, end):
        entry = entries + tl.minimum(i + 1, end - 1) * _ENTRY_FIELDS
        next_page = tl.load(entry)
        next_tokens = tl.load(entry + 1)
        next_first = tl.load(entry + 2)
        # Nothing but its length bounds what a row sees of its own: the list may hold pages that it has yet to reach.
        seen = tl.minimum(tokens, length - first)
        acc, peak, total = _meet_page(
            acc, peak, total, query, k_pages, v_pages, kv_head, page, seen, first, sees_from, scale, softcap,
            True, WINDOW, SOFTCAP, PAGE, QK_BLOCK, V_BLOCK,
        )  # fmt: skip
        page, tokens, first = next_page, next_tokens, next_first

    # A line that saw nothing: output 0 and LSE -inf, both.
    divisor = tl.where(total > 0, total, 1.0)
    acc = acc / divisor[:, None]
    at = tl.arange(0, V_BLOCK)
    inside = valid[:, None] & (at < V_DIM)[None, :]
    if part < 0:
        tl.store(out + place[:, None] * V_DIM + at[None, :], acc.to(out.dtype.element_ty), mask=inside)
    else:
        lse = tl.where(total > 0, peak + tl.log2(divisor), float("-inf"))
        part_row = tl.load(row_parts + line_row, mask=valid, other=0) + part
        place = part_row.to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(part_out + place[:, None] * V_DIM + at[None, :], acc, mask=inside)
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
        peak = tl.load(sinks + head, mask=head < HEADS, other=0.0).to(tl.float32) * _LOG2E
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


def _by_page(cache: torch.Tensor) -> TensorDescriptor:
    """To be read in boxes of one page and one head."""
    return TensorDescriptor.from_tensor(cache, [1, cache.shape[1], 1, triton.next_power_of_2(cache.shape[3])])


def attend_items(
    tile: int,
    q: torch.Tensor,  # [rows, heads, qk_dim]
    k_pages: torch.Tensor,  # [pages, page_size, kv_heads, qk_dim]  in any memory order that ends with qk_dim
    v_pages: torch.Tensor,  # [pages, page_size, kv_heads, v_dim]
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
    """All items of one tile."""
    items = work.items[tile]
    _, page_size, kv_heads, qk_dim = k_pages.shape
    scale, cap = (scale * _LOG2E.value, 0.0) if softcap is None else (scale / softcap, softcap * _LOG2E.value)
    _attend_items[(len(items) * kv_heads,)](
        q, _by_page(k_pages), _by_page(v_pages), out, part_out, part_lse,
        items, work.counts[tile], work.entries, work.row_parts, lengths, scale, cap,
        BLOCK_M=tile, WINDOW=window or 0, SOFTCAP=softcap is not None,
        GROUP=q.shape[1] // kv_heads, KV_HEADS=kv_heads, PAGE=page_size, QK_DIM=qk_dim, V_DIM=v_pages.shape[3],
        **LAUNCHES[tile] | ({"num_warps": 4} if qk_dim > 128 else {}),  # two warps would spill
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
