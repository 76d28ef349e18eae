"""Prefill attention over work lists in plain PyTorch: the reference of ``prefill_triton``.

Same signature, same lists, any device, any dtype: half precision is computed in float32, float64 stays float64.
"""

from __future__ import annotations

import torch

from ..lists.work_lists import PrefillWork
from .attention_parts_torch import EVERYTHING, apply_sinks, attend


def attend_chunks(
    q: torch.Tensor,  # [rows, heads, qk_dim]
    k_pages: torch.Tensor,  # [pages, page_size, kv_heads, qk_dim]
    v_pages: torch.Tensor,  # [pages, page_size, kv_heads, v_dim]
    out: torch.Tensor,  # [rows, heads, v_dim]  rows of no chunk are left as they are
    work: PrefillWork,
    scale: float,
    *,
    window: int | None = None,  # as the lists were built
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads]
    options: dict[str, int] | None = None,  # for the kernel alone
) -> None:
    """All rows of all chunks."""
    for row, rows, position, short, shorts, rest, _, _, pages in work.items[: int(work.count), :9].tolist():
        # First the partly filled pages, then the others, which stand elsewhere in the list.
        entries = torch.cat([work.entries[short : short + shorts], work.entries[rest + shorts : rest + pages]])
        sees_to = torch.arange(position + 1, position + rows + 1, device=q.device)
        sees_from = sees_to - (window or EVERYTHING)
        assert rows * (q.shape[1] // k_pages.shape[2]) <= work.tile, "an item of more lines than its tile has"
        here = slice(row, row + rows)
        if work.sees_to is not None:
            sees_to = work.sees_to[here]
        attended, lse = _attend_pages(q[here], k_pages, v_pages, entries, sees_from, sees_to, scale, softcap)
        if sinks is not None:
            apply_sinks(attended, lse, sinks)
        out[here] = attended.to(out.dtype)


def _attend_pages(
    q: torch.Tensor,  # [rows, heads, qk_dim]
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    entries: torch.Tensor,  # [entries, ENTRY_FIELDS]
    sees_from: torch.Tensor,  # [rows]  a row sees the positions [sees_from, sees_to)
    sees_to: torch.Tensor,  # [rows]
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows against the pages of some entries, in float32 or float64; the LSE is a natural logarithm."""
    page, tokens, first = entries[:, :3].long().unbind(1)
    offset = torch.arange(k_pages.shape[1], device=q.device)
    at = (first[:, None] + offset)[None]  # [1, entries, page_size]
    visible = (at >= sees_from[:, None, None]) & (at < sees_to[:, None, None]) & (offset < tokens[:, None])
    # What no row sees is not even read: a free page may hold NaN, and 0 x NaN is NaN.
    entry, offset = visible.any(0).nonzero(as_tuple=True)
    exact = torch.promote_types(q.dtype, torch.float32)
    if len(entry) == 0:
        nothing = q.new_zeros(*q.shape[:2], v_pages.shape[3], dtype=exact)
        return nothing, q.new_full(q.shape[:2], -torch.inf, dtype=exact)
    mask = visible[:, entry, offset]  # [rows, keys]
    keys, values = (pages[page[entry], offset].to(exact) for pages in (k_pages, v_pages))
    return attend(q.to(exact), keys, values, scale, mask=None if mask.all() else mask, softcap=softcap)
