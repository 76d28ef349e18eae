"""What the Triton attention kernels share: how a tile of query lines meets the pages of a paged cache.

K and V are seen as [pages, page, KV heads, dim] and read by the copy engine in boxes of one page and one head (a long
page in several boxes); a box is one tile of keys. The heads that share a KV head are packed with the query rows of an
item into lines, ``BLOCK_M`` of them to a block; an item of more lines than that takes several blocks. Decode and
prefill differ in their lists and in what a line sees, not in this. The figures behind the choices are in
docs/attention-notes.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .work_lists import ENTRY_FIELDS, PAGE_SIZES, TILES

LOG2E = tl.constexpr(1.4426950408889634)
_ENTRY_FIELDS = tl.constexpr(ENTRY_FIELDS)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST_HEAD = 256  # also the most that a box can hold
_WIDEST_BOX = 64  # tokens


@triton.constexpr_function
def block_of(dim: int) -> int:
    """The columns of a tile for heads of this dim: a power of two, and a product needs 16."""
    columns: int = triton.next_power_of_2(dim)
    return max(16, columns)


@triton.constexpr_function
def boxes_of(page_size: int) -> int:
    """How many boxes a page is read in: what fits on chip must not hang on the size of the pages."""
    return max(1, page_size // _WIDEST_BOX)


@triton.jit
def read_entry(entries, at):
    """A page, how many of its tokens are valid, and the position of the first."""
    entry = entries + at * _ENTRY_FIELDS
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


@triton.jit
def load_query(
    q,  # [rows, heads, QK_DIM]
    row,  # the item's first
    rows,
    first_line,  # of this block
    kv_head,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QK_DIM: tl.constexpr,
):
    """The lines [M, QK]; of each its row (counted from the item's first), its head, its place in ``q``, and whether
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
def load_box(k_pages, v_pages, page, start, kv_head, BOX: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr):
    """K [BOX, QK] and V [BOX, V] from the page's token ``start`` on (see ``box_start``)."""
    k_box = k_pages.load([page, start, kv_head, 0]).reshape(BOX, block_of(QK_DIM))
    v_box = v_pages.load([page, start, kv_head, 0]).reshape(BOX, block_of(V_DIM))
    return k_box, v_box


@triton.jit
def box_start(seen, offset, BOX: tl.constexpr):
    """Where to read the box at ``offset`` of a page, of whose first ``seen`` tokens alone some line sees any.

    Keys may stand anywhere in a tile, so the box is moved up until it ends with the last of them. What sticks out of
    the page comes as zeros, and costs no bytes. Beyond them a page may hold a stale NaN, and 0 x NaN is NaN: masks on
    the scores alone would not do.
    """
    return tl.minimum(tl.maximum(seen, 0), offset + BOX) - BOX


@triton.jit
def score_box(query, k_box, scale, softcap, SOFTCAP: tl.constexpr):
    """[M, BOX], yet to be multiplied by scale where there is no soft cap."""
    scores = tl.dot(query, tl.trans(k_box), input_precision="ieee")
    if SOFTCAP:  # scale is what the tanh wants, softcap is in units of log2; tanh(x) = 2 sigmoid(2x) - 1
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scale * scores) - 1.0)
    return scores


@triton.jit
def hide_tokens(
    scores,  # [M, BOX]
    start,  # where the box was read
    offset,  # where it belongs
    sees,  # [M]  a line sees the page's tokens below this one (with CAUSAL), and as many of them as the window
    BOX: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    token = start + tl.arange(0, BOX)
    visible = (token >= offset)[None, :]
    if CAUSAL:
        visible = visible & (token[None, :] < sees[:, None])
    if WINDOW > 0:
        visible = visible & (token[None, :] >= sees[:, None] - WINDOW)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def add_box(
    acc,  # [M, V] float32
    peak,  # [M]  the largest score so far, times scale
    total,  # [M]  sum of exp2(score - peak)
    scores,  # [M, BOX]
    factor,  # scale, or 1 where the scores have it
    v_box,  # [BOX, V]
    MASK: tl.constexpr,  # whether a line may have seen nothing yet
):
    """One step of the online softmax."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    safe = new_peak
    if MASK:  # any finite number does for the peak of nothing, and avoids inf - inf
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * factor - safe[:, None])
    shrink = tl.exp2(peak - safe)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v_box.dtype), v_box, acc * shrink[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def store_lines(out, place, valid, acc, V_DIM: tl.constexpr):
    at = tl.arange(0, block_of(V_DIM))
    inside = valid[:, None] & (at < V_DIM)[None, :]
    tl.store(out + place[:, None] * V_DIM + at[None, :], acc.to(out.dtype.element_ty), mask=inside)


def by_page(pages: torch.Tensor | TensorDescriptor) -> TensorDescriptor:
    """K or V [pages, page, kv_heads, dim], in any memory order that ends with dim, to be read by page and head.

    Whoever launches often makes it once, and lets go of it with the tensor: it holds the tensor.
    """
    if isinstance(pages, TensorDescriptor):
        return pages
    page_size, dim = pages.shape[1], pages.shape[3]
    return TensorDescriptor.from_tensor(pages, [1, page_size // boxes_of(page_size), 1, block_of(dim)])


def in_log2(scale: float, softcap: float | None) -> tuple[float, float]:
    """What the kernels take as scale and soft cap: they compute with exp2."""
    if softcap is None:
        return scale * LOG2E.value, 0.0
    return scale / softcap, softcap * LOG2E.value


def exact_options(widest: int) -> tuple[int, int, int]:
    """Lines of a block, warps and stages in float32, for heads of at most ``widest``.

    There are no tensor cores at full precision, so it is slow whatever is chosen. More lines, or fewer warps, would
    spill registers by the kilobyte.
    """
    return 16, 4 if widest <= 128 else 8, 1


def unsupported(q_heads: int, kv_heads: int, qk_dim: int, v_dim: int, page_size: int, dtype: torch.dtype) -> str | None:
    """Why the attention kernels cannot do this shape; None if they can."""
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
        if dim * dtype.itemsize % 16:  # what the copy engine asks of strides
            return f"a head of {dim} dimensions in {named} has {dim * dtype.itemsize} bytes, not a multiple of 16"
    return None
