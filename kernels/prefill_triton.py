"""Prefill attention in Triton: chunks of prompts, each against its whole page table, causal, in one launch.

A chunk is a run of query rows of one unit, at consecutive positions. It reads the pages of the shared prefixes below
its unit and those of the unit itself, as a decode row does. But it has rows enough of its own to make the products the
bound: nothing is read together with other chunks, nothing is cut along the keys, and no partial result is written.

Query rows and the heads that share a KV head are packed into tiles of ``BLOCK_M`` lines, as for decode. A tile then
holds few positions, so that little is wasted on the diagonal and where a chunk ends. An *item* is one tile of rows, one
block for each KV head. A page is one tile of keys; only pages that some row does not see whole pay for masks.
The figures behind the choices are in docs/attention-notes.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cascade_triton import _by_page
from .work_lists import CHUNK_FIELDS, ENTRY_FIELDS, PrefillWork

_CHUNK_FIELDS = tl.constexpr(CHUNK_FIELDS)
_ENTRY_FIELDS = tl.constexpr(ENTRY_FIELDS)
_LOG2E = tl.constexpr(1.4426950408889634)


def launch_options(group: int, qk_dim: int, v_dim: int, itemsize: int) -> dict[str, int]:
    """The tile, warps and stages for heads of these dims and elements of this many bytes."""
    widest = max(qk_dim, v_dim)
    if itemsize == 4:  # no tensor cores: exact, and slow whatever the tile
        tile, warps, stages = 32, 8, 1
    else:
        # Two or three blocks on a multiprocessor, so that one's products hide the other's softmax. The third stage
        # is worth a quarter and more; where it would cost the second block, no stages at all are better than two.
        tile, warps, stages = 64, 4, 3 if widest <= 128 else 1
    if group > tile:
        tile = triton.next_power_of_2(group)
        warps, stages = (4, 2) if itemsize < 4 and tile == 128 and widest <= 128 else (8, 1)
    return {"tile": tile, "num_warps": warps, "num_stages": stages}


@triton.jit
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
    BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
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
    record = items + item * _CHUNK_FIELDS
    row = tl.load(record)
    rows = tl.load(record + 1)
    position = tl.load(record + 2)
    short = tl.load(record + 3)
    shorts = tl.load(record + 4)
    rest = tl.load(record + 5)
    full_from = tl.load(record + 6)
    full_to = tl.load(record + 7)
    pages = tl.load(record + 8)
    if item >= tl.load(n_items):  # after the record, so that all these loads are under way together
        return
    entry = entries + tl.where(shorts > 0, short, rest) * _ENTRY_FIELDS
    page = tl.load(entry)
    tokens = tl.load(entry + 1)
    first = tl.load(entry + 2)

    line = tl.arange(0, BLOCK_M)
    line_row = line // GROUP
    valid = line_row < rows
    head = kv_head * GROUP + line % GROUP
    place = (row + line_row).to(tl.int64) * (KV_HEADS * GROUP) + head  # [M]
    at = tl.arange(0, QK_BLOCK)
    query = tl.load(q + place[:, None] * QK_DIM + at[None, :], mask=valid[:, None] & (at < QK_DIM)[None, :], other=0.0)
    acc = tl.zeros([BLOCK_M, V_BLOCK], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)  # the largest score so far, times scale
    total = tl.zeros([BLOCK_M], tl.float32)  # sum of exp2(score - peak)
    if SINKS:  # a logit without a value
        peak = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * _LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)

    # One loop for all pages: a second one would start with empty buffers. And a page's entry is read one turn ahead:
    # with a load of the same turn in the address, nothing would be prefetched.
    for i in tl.range(0, pages):
        ahead = tl.minimum(i + 1, pages - 1)
        entry = entries + (ahead + tl.where(ahead < shorts, short, rest)) * _ENTRY_FIELDS
        next_page = tl.load(entry)
        next_tokens = tl.load(entry + 1)
        next_first = tl.load(entry + 2)
        # The box is moved up until it ends with the last token that a row sees: what sticks out of the page comes as
        # zeros. Beyond that token a page may hold a stale NaN, and 0 x NaN is NaN: masks on the scores would not do.
        start = tl.minimum(tokens, position + rows - first)
        start = tl.minimum(start, PAGE) - PAGE
        k_page = k_pages.load([page, start, kv_head, 0]).reshape(PAGE, QK_BLOCK)
        v_page = v_pages.load([page, start, kv_head, 0]).reshape(PAGE, V_BLOCK)
        scores = tl.dot(query, tl.trans(k_page), input_precision="ieee")  # [M, PAGE]
        factor = scale
        if SOFTCAP:  # scale is what the tanh wants, softcap is in units of log2; tanh(x) = 2 sigmoid(2x) - 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scale * scores) - 1.0)
            factor = 1.0
        if (i < full_from) | (i >= full_to):
            token = tl.arange(0, PAGE) + start
            sees_to = position + line_row - first  # [M]
            visible = (token >= 0)[None, :] & (token[None, :] <= sees_to[:, None])
            if WINDOW > 0:
                visible = visible & (token[None, :] > sees_to[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        # A line that has seen nothing yet: any finite number does for its peak, and avoids inf - inf.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores * factor - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v_page.dtype), v_page, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
        page, tokens, first = next_page, next_tokens, next_first

    acc = acc / total[:, None]  # never 0: a row sees itself
    at = tl.arange(0, V_BLOCK)
    inside = valid[:, None] & (at < V_DIM)[None, :]
    tl.store(out + place[:, None] * V_DIM + at[None, :], acc.to(out.dtype.element_ty), mask=inside)


def attend_chunks(
    q: torch.Tensor,  # [rows, heads, qk_dim]
    k_pages: torch.Tensor,  # [pages, page_size, kv_heads, qk_dim]  in any memory order that ends with qk_dim
    v_pages: torch.Tensor,  # [pages, page_size, kv_heads, v_dim]
    out: torch.Tensor,  # [rows, heads, v_dim]  rows of no chunk are left as they are
    work: PrefillWork,
    scale: float,
    *,
    window: int | None = None,  # as the lists were built
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads]
    options: dict[str, int] | None = None,  # num_warps, num_stages: other than ``launch_options`` says
) -> None:
    """All rows of all chunks."""
    _, page_size, kv_heads, qk_dim = k_pages.shape
    v_dim = v_pages.shape[3]
    if options is None:
        options = launch_options(q.shape[1] // kv_heads, qk_dim, v_dim, q.element_size())
    scale, cap = (scale * _LOG2E.value, 0.0) if softcap is None else (scale / softcap, softcap * _LOG2E.value)
    _attend_chunks[(len(work.items) * kv_heads,)](
        q, _by_page(k_pages), _by_page(v_pages), out,
        work.items, work.count, work.entries, out if sinks is None else sinks, scale, cap,
        BLOCK_M=work.tile, WINDOW=window or 0, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        GROUP=q.shape[1] // kv_heads, KV_HEADS=kv_heads, PAGE=page_size, QK_DIM=qk_dim, V_DIM=v_dim,
        num_warps=options["num_warps"], num_stages=options["num_stages"],
    )  # fmt: skip
