"""Prefill attention in Triton: chunks of prompts, each against its whole page table, causal, in one launch.

A chunk is a run of query rows of one unit, at consecutive positions. It reads the pages of the shared prefixes below
its unit and the pages of the unit itself, as a decode row does. But it has enough rows of its own for the products to
take most of the time: chunks share no reading, are not cut along the keys, and write no partial results. In some models
a token of an image sees all of the image: a list then says up to where each row sees.

Query rows and the heads that share a KV head are packed into tiles, as for decode. A tile then holds few positions, so
that little is wasted on the diagonal and at a chunk's end. An *item* is one tile of rows, with one block for each KV
head. Only pages that some row does not see whole need masks. How pages are read is in pages_triton.py; the figures
behind the choices are in docs/attention-notes.md.
"""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType

import torch

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..cards import capability_on, card_in_use, card_on
from ..lists.work_lists import CHUNK_FIELDS, PrefillWork
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

_CHUNK_FIELDS = tl.constexpr(CHUNK_FIELDS)
# Gluon still changes. With 3.6 the kernel has run on a card, and 3.7 compiles it alike. It compiles with 3.8 and 3.9,
# too, but a race between its copies and its products would show on a card alone.
_GLUON_VERSIONS = ((3, 6), (3, 7))


def for_hopper() -> ModuleType | None:
    """The kernel for Hopper cards; None on other devices, and with versions of Triton for which it is not written."""
    return _for_hopper(torch.cuda.current_device() if torch.cuda.is_available() else None)


@cache
def _for_hopper(device: int | None) -> ModuleType | None:
    if triton.knobs.runtime.interpret or device is None:
        return None
    capability = capability_on(torch.device("cuda", device))
    if capability is None or capability[0] != 9:  # for other cards, compiling it would abort the process
        return None
    if tuple(map(int, triton.__version__.split(".")[:2])) not in _GLUON_VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in _GLUON_VERSIONS)
        warnings.warn(
            f"prompts run through a slower attention kernel: the one for Hopper GPUs is made for Triton {known}, and "
            f"this is {triton.__version__}",
            stacklevel=3,
        )
        return None
    from . import prefill_hopper

    return prefill_hopper


def launch_options(group: int, qk_dim: int, v_dim: int, itemsize: int) -> dict[str, int]:
    """The tile, warps and stages for heads of these dims and elements of this many bytes.

    ``wide`` is the tile of the kernel for Hopper cards, if the device has it and it takes such heads.
    """
    lines, warps, stages, _ = card_in_use().prompts(max(qk_dim, v_dim), itemsize)
    chosen = {"tile": lines * triton.cdiv(group, lines), "num_warps": warps, "num_stages": stages}
    hopper = for_hopper()
    if hopper is not None and hopper.takes(qk_dim, v_dim, itemsize):
        wide = hopper.LINES * hopper.sides(qk_dim, v_dim)
        if group <= wide:
            chosen["wide"] = wide
    return chosen


@triton.jit
def _attend_chunks(
    q,  # [rows, heads, QK_DIM]
    k_pages,  # [pages, PAGE, KV_HEADS, QK_DIM], by ``by_page``
    v_pages,  # [pages, PAGE, KV_HEADS, V_DIM], by ``by_page``
    out,  # [rows, heads, V_DIM]
    items,
    n_items,
    entries,
    sinks,  # [heads]
    further,  # [rows]  the position up to which each row sees, with TWO_WAY
    scale,
    softcap,
    BLOCK_M: tl.constexpr,
    SLICES: tl.constexpr,  # blocks for an item's lines
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    TWO_WAY: tl.constexpr,  # whether some row sees further than to itself
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
    reach = position + rows
    if TWO_WAY:
        reach = tl.load(record + 9)
    # Checked after the record is loaded, so that all these loads are under way together.
    if (item >= tl.load(n_items)) | (first_line >= rows * GROUP):
        return
    page, tokens, first = read_entry(entries, tl.where(shorts > 0, short, rest))

    query, line_row, head, place, valid = load_query(
        q, row, rows, first_line, kv_head, BLOCK_M, GROUP, KV_HEADS, QK_DIM
    )
    sees_to = position + line_row + 1
    sees_from = sees_to - WINDOW
    if TWO_WAY:
        sees_to = tl.load(further + row + line_row, mask=valid, other=0)
    acc = tl.zeros([BLOCK_M, block_of(V_DIM)], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # a logit without a value
        peak = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)

    # One loop for all pages: a second one would start with empty buffers. A page's entry is read one turn ahead: if
    # the address needed a load of the same turn, nothing would be prefetched.
    for i in tl.range(0, pages * BOXES):
        ahead = tl.minimum((i + 1) // BOXES, pages - 1)
        next_page, next_tokens, next_first = read_entry(entries, ahead + tl.where(ahead < shorts, short, rest))
        hides = (i < full_from * BOXES) | (i >= full_to * BOXES)
        acc, peak, total = attend_box(
            acc, peak, total, query, k_pages, v_pages, page, tokens, first, i % BOXES * BOX, reach,
            sees_from, sees_to, hides, kv_head, scale, softcap, BOX, QK_DIM, V_DIM, SOFTCAP, True, WINDOW, False,
            PAGE, KV_HEADS, DESCRIPTORS,
        )  # fmt: skip
        page, tokens, first = next_page, next_tokens, next_first

    store_lines(out, place, valid, acc / total[:, None], V_DIM)  # never 0: a row sees itself


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend_chunks(
    q: torch.Tensor,  # [rows, heads, qk_dim]
    k_pages: torch.Tensor | TensorDescriptor,  # [pages, page_size, kv_heads, qk_dim]; a descriptor is by ``by_page``
    v_pages: torch.Tensor | TensorDescriptor,  # [pages, page_size, kv_heads, v_dim]
    out: torch.Tensor,  # [rows, heads, v_dim]  rows of no chunk are left as they are
    work: PrefillWork,
    scale: float,
    *,
    window: int | None = None,  # as the lists were built
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads]
    options: dict[str, int] | None = None,  # num_warps, num_stages, maybe wide; by default ``launch_options``
) -> None:
    """Attend for all rows of all chunks."""
    _, page_size, kv_heads, qk_dim = k_pages.shape
    v_dim = v_pages.shape[3]
    lines = work.tile
    assert scale > 0, "the largest score is found before it is scaled"
    scale, cap = in_log2(scale, softcap)
    chosen = options or launch_options(1, qk_dim, v_dim, q.element_size())
    if lines == chosen.get("wide"):
        assert work.sees_to is None, "the kernel for Hopper cards is causal"
        hopper = for_hopper()
        assert hopper is not None
        hopper.attend_chunks(
            q, k_pages, v_pages, out, work, scale, cap,
            blocks=multiprocessors(q.device), window=window or 0, caps=softcap is not None, sinks=sinks,
        )  # fmt: skip
        return
    if options is None:
        lines = min(lines, chosen["tile"])  # several blocks share an item of more lines
    slices = triton.cdiv(work.tile, lines)
    card = card_on(q.device)
    _attend_chunks[(len(work.items) * slices * kv_heads,)](
        q, by_page(k_pages), by_page(v_pages), out,
        work.items, work.count, work.entries, out if sinks is None else sinks,
        work.count if work.sees_to is None else work.sees_to, scale, cap,
        BLOCK_M=lines, SLICES=slices, WINDOW=window or 0, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        TWO_WAY=work.sees_to is not None,
        GROUP=q.shape[1] // kv_heads, KV_HEADS=kv_heads, PAGE=page_size, QK_DIM=qk_dim, V_DIM=v_dim,
        LONGEST_BOX=card.prompts(max(qk_dim, v_dim), q.element_size()).box, DESCRIPTORS=card.descriptors,
        num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
    )  # fmt: skip
