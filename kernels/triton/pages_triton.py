"""The code that the Triton attention kernels share: how a tile of query lines meets the pages of a paged cache.

K and V have the shape [pages, page, KV heads, dim]. They are read in *boxes* of one page and one head (a long page in
several boxes), by a card's copy engine or by plain loads (cards.py says which). A box is one tile of keys. The query
rows of an item and the heads that share a KV head are packed into *lines*, ``BLOCK_M`` of them to a block; an item with
more lines takes several blocks. Decode and prefill differ in their lists and in the tokens that a line sees, not in
this. The figures behind the choices are in docs/attention-notes.md.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..cards import BOX_OF_DESCRIPTORS, card_on
from ..lists.work_lists import ENTRY_FIELDS, PAGE_SIZES, TILES

LOG2E = tl.constexpr(1.4426950408889634)
_ENTRY_FIELDS = tl.constexpr(ENTRY_FIELDS)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST_HEAD = 256  # dimensions; also the limit of the copy engine for a box


@triton.constexpr_function
def block_of(dim: int) -> int:
    """The columns of a tile for heads of this dim: a power of two, and at least 16 for a product."""
    columns: int = triton.next_power_of_2(dim)
    return max(16, columns)


@triton.constexpr_function
def boxes_of(page_size: int, longest_box: int) -> int:
    """The number of boxes in a page. Long pages are split: the memory on chip must not depend on the page size."""
    return max(1, page_size // longest_box)


@triton.jit
def read_entry(entries, at):
    """An entry of the page table: a page, the number of its valid tokens, the position of its first token."""
    entry = entries + at * _ENTRY_FIELDS
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


@triton.jit
def load_query(
    q,  # [rows, heads, QK_DIM]
    row,  # the item's first row
    rows,
    first_line,  # of this block
    kv_head,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QK_DIM: tl.constexpr,
):
    """The lines [M, QK]; and for each line its row (from the item's first), its head, its place in ``q``, and whether
    the item has such a line."""
    line = first_line + tl.arange(0, BLOCK_M)
    line_row = line // GROUP
    valid = line_row < rows
    head = kv_head * GROUP + line % GROUP
    place = (row + line_row).to(tl.int64) * (KV_HEADS * GROUP) + head
    at = tl.arange(0, block_of(QK_DIM))
    inside = valid[:, None] & (at < QK_DIM)[None, :]
    query = tl.load(q + place[:, None] * QK_DIM + at[None, :], mask=inside, other=0.0)
    return query, line_row, head, place, valid


@triton.jit
def _load_box(
    pages,
    page,
    start,  # see ``_box_start``
    kv_head,
    BOX: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WHOLE: tl.constexpr,  # whether the box lies in the page with all its tokens
    DESCRIPTORS: tl.constexpr,
):
    """K or V [BOX, DIM] from the page's token ``start`` on, through a descriptor or by plain loads."""
    if DESCRIPTORS:
        box = pages.load([page, start, kv_head, 0]).reshape(BOX, block_of(DIM))
    else:
        token = tl.arange(0, BOX)[:, None]
        at = tl.arange(0, block_of(DIM))[None, :]
        place = pages + (page.to(tl.int64) * PAGE + start) * (KV_HEADS * DIM) + kv_head * DIM
        place += token * (KV_HEADS * DIM) + at
        if not WHOLE:
            box = tl.load(place, mask=(token + start >= 0) & (at < DIM), other=0.0)
        elif block_of(DIM) == DIM:
            box = tl.load(place)
        else:
            box = tl.load(place, mask=at < DIM, other=0.0)
    return box


@triton.jit
def _box_start(seen, offset, BOX: tl.constexpr):
    """Where to read the box that belongs at ``offset``, when lines see only the first ``seen`` tokens of the page.

    Keys may stand anywhere in a tile, so the box is moved towards the page's start until it ends with the last seen
    token. The part before the page's start arrives as zeros, and costs no bytes. Tokens behind the seen ones must not
    be read: they may hold a stale NaN, and 0 x NaN is NaN, so masking the scores would not be enough.
    """
    return tl.minimum(tl.maximum(seen, 0), offset + BOX) - BOX


@triton.jit
def _score_box(query, k_box, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores [M, BOX]. Without a soft cap they still have to be multiplied by ``scale``."""
    scores = tl.dot(query, tl.trans(k_box), input_precision="ieee")
    if SOFTCAP:  # ``in_log2`` made scale for the tanh, and softcap in units of log2; tanh(x) = 2 sigmoid(2x) - 1
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scale * scores) - 1.0)
    return scores


@triton.jit
def _hide_tokens(
    scores,  # [M, BOX]
    start,  # the page's token at which the box was read
    offset,  # the token at which it belongs
    sees_from,  # [M]  a line sees the page's tokens from this one on (with a WINDOW)
    sees_to,  # [M]  and those below this one (with CAUSAL)
    BOX: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    token = start + tl.arange(0, BOX)
    visible = (token >= offset)[None, :]
    if CAUSAL:
        visible = visible & (token[None, :] < sees_to[:, None])
    if WINDOW > 0:
        visible = visible & (token[None, :] >= sees_from[:, None])
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _add_box(
    acc,  # [M, V] float32
    peak,  # [M]  the largest score so far, times scale
    total,  # [M]  sum of exp2(score - peak)
    scores,  # [M, BOX]
    factor,  # scale, or 1 if the scores contain it
    v_box,  # [BOX, V]
    MASKED: tl.constexpr,  # whether a line may have seen no token yet
):
    """One step of the online softmax."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    safe = new_peak
    if MASKED:  # before a line has seen a token any finite peak will do, and avoids inf - inf
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * factor - safe[:, None])
    shrink = tl.exp2(peak - safe)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v_box.dtype), v_box, acc * shrink[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def attend_box(
    acc,  # these three as in ``_add_box``
    peak,
    total,
    query,  # [M, QK]
    k_pages,
    v_pages,
    page,  # these three as ``read_entry`` gives them
    tokens,
    first,
    offset,  # of the box in its page
    reach,  # the position up to which some line sees
    sees_from,  # [M]  the position from which a line sees, if there is a WINDOW
    sees_to,  # [M]  the position up to which it sees
    hides,  # whether some line does not see all of the box
    kv_head,
    scale,
    softcap,
    BOX: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,  # every line sees the whole page: tokens, first, reach, hides and what a line sees are ignored
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,  # whether K and V are read by the copy engine
):
    """Attend to one box of a page: a step of the online softmax for all lines."""
    start = offset
    if not WHOLE:
        start = _box_start(tl.minimum(tokens, reach - first), offset, BOX)
    k_box = _load_box(k_pages, page, start, kv_head, BOX, QK_DIM, PAGE, KV_HEADS, WHOLE, DESCRIPTORS)
    v_box = _load_box(v_pages, page, start, kv_head, BOX, V_DIM, PAGE, KV_HEADS, WHOLE, DESCRIPTORS)
    scores = _score_box(query, k_box, scale, softcap, SOFTCAP)
    if not WHOLE and hides:
        scores = _hide_tokens(scores, start, offset, sees_from - first, sees_to - first, BOX, CAUSAL, WINDOW)
    factor = scale
    if SOFTCAP:
        factor = 1.0
    return _add_box(acc, peak, total, scores, factor, v_box, not WHOLE)


@triton.jit
def store_lines(out, place, valid, acc, V_DIM: tl.constexpr):
    at = tl.arange(0, block_of(V_DIM))
    inside = valid[:, None] & (at < V_DIM)[None, :]
    tl.store(out + place[:, None] * V_DIM + at[None, :], acc.to(out.dtype.element_ty), mask=inside)


def by_page(pages: torch.Tensor | TensorDescriptor) -> torch.Tensor | TensorDescriptor:
    """K or V [pages, page, kv_heads, dim] as the kernels read it on this card.

    Through a descriptor any memory order will do that ends with dim. Make it once for many launches. It keeps the
    tensor alive, so drop both together.
    """
    if isinstance(pages, TensorDescriptor):
        return pages
    if not card_on(pages.device).descriptors:
        assert pages.is_contiguous()
        return pages
    page_size, dim = pages.shape[1], pages.shape[3]
    box = page_size // boxes_of(page_size, BOX_OF_DESCRIPTORS)
    return TensorDescriptor.from_tensor(pages, [1, box, 1, block_of(dim)])


def in_log2(scale: float, softcap: float | None) -> tuple[float, float]:
    """Scale and soft cap as the kernels take them: they compute with exp2."""
    if softcap is None:
        return scale * LOG2E.value, 0.0
    return scale / softcap, softcap * LOG2E.value


def unsupported(q_heads: int, kv_heads: int, qk_dim: int, v_dim: int, page_size: int, dtype: torch.dtype) -> str | None:
    """Why the attention kernels cannot take this shape; None if they can."""
    named = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        return f"the model runs in {named}; the Triton kernels take bfloat16, float16 and float32"
    if page_size not in PAGE_SIZES:
        return f"page_size is {page_size}; the Triton kernels take {', '.join(map(str, PAGE_SIZES))}"
    if q_heads % kv_heads:
        return f"{q_heads} query heads cannot be dealt evenly to {kv_heads} KV heads"
    if q_heads // kv_heads > TILES[-1]:
        return f"{q_heads // kv_heads} query heads share a KV head; the Triton kernels take at most {TILES[-1]}"
    for dim in (qk_dim, v_dim):
        if dim > WIDEST_HEAD:
            return f"a head has {dim} dimensions; the Triton kernels take at most {WIDEST_HEAD}"
        if dim * dtype.itemsize % 16:  # the copy engine needs strides of whole 16 bytes
            return f"a head of {dim} dimensions in {named} has {dim * dtype.itemsize} bytes, not a multiple of 16"
    return None
