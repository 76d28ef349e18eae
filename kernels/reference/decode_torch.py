"""Decode attention over work lists in plain PyTorch: the references of ``decode_triton``.

Same signatures, same lists, any device, any dtype: half precision is computed in float32, float64 stays float64. So a
whole engine can run over work lists without a GPU; the tests compare the kernels with these references.
"""

from __future__ import annotations

import math

import torch

from ..lists.work_lists import WorkLists
from .attention_parts_torch import EVERYTHING, apply_sinks, attend_all


def attend_items(
    tile: int,
    q: torch.Tensor,  # [rows, heads, qk_dim]
    k_pages: torch.Tensor,  # [pages, page_size, kv_heads, qk_dim]
    v_pages: torch.Tensor,  # [pages, page_size, kv_heads, v_dim]
    out: torch.Tensor,  # [rows, heads, v_dim]
    part_out: torch.Tensor,  # [parts, heads, v_dim]
    part_lse: torch.Tensor,  # [parts, heads]  log2
    work: WorkLists,
    lengths: torch.Tensor,  # [rows]  how many positions a row sees
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """All items of one tile, at once: filled up to as many rows and as many pages as the largest has."""
    items = work.items[tile][: int(work.counts[tile]), :7].long()
    if not len(items):
        return
    row, rows, begin, full, end, part, causal = items.unbind(1)
    assert int(rows.max()) * (q.shape[1] // k_pages.shape[2]) <= tile, "an item of more lines than its tile has"
    line = torch.arange(int(rows.max()), device=q.device)
    real = line < rows[:, None]  # [items, rows]
    at = torch.where(real, row[:, None] + line, row[:, None])
    sees_to = lengths[at].long()
    sees_from = sees_to - (window or EVERYTHING)
    own = (rows == 1) | (causal != 0)  # what several rows read is behind all of them
    ended = own & (lengths[row + rows - 1] == 0)  # the pages of such an item may never have been written
    full, end = torch.where(ended, begin, full), torch.where(ended, begin, end)
    sees_to = torch.where(own[:, None], sees_to, EVERYTHING)

    nth = torch.arange(max(int((end - begin).max()), 1), device=q.device)
    here = begin[:, None] + nth
    there = here < end[:, None]  # [items, entries]
    page, tokens, first = work.entries[torch.where(there, here, 0), :3].long().unbind(2)
    offset = torch.arange(k_pages.shape[1], device=q.device)
    position = (first[..., None] + offset)[:, None]  # [items, 1, entries, page_size]
    visible = (position >= sees_from[..., None, None]) & (position < sees_to[..., None, None])
    visible &= (offset < tokens[..., None])[:, None]
    # All rows saw all of the first pages as the lists were made.
    visible |= (here < full[:, None])[:, None, :, None]
    visible &= there[:, None, :, None] & real[..., None, None]
    visible = visible.flatten(2)  # [items, rows, keys]
    # What no row sees is not even read: a free page may hold NaN, and 0 x NaN is NaN.
    seen = visible.any(1)[..., None, None]
    exact = torch.promote_types(q.dtype, torch.float32)
    keys, values = (
        torch.where(seen, pages[torch.where(there, page, 0)].flatten(1, 2), 0).to(exact) for pages in (k_pages, v_pages)
    )
    attended, lse = attend_all(q[at].to(exact), keys, values, scale, visible, softcap=softcap)

    alone, joined = (real & (part < 0)[:, None]).flatten(), (real & (part >= 0)[:, None]).flatten()
    rows_of = at.flatten()
    out[rows_of[alone]] = attended[alone].to(out.dtype)
    to = work.row_parts[rows_of[joined]] + part.repeat_interleave(len(line))[joined]
    part_out[to] = attended[joined].to(part_out.dtype)
    part_lse[to] = (lse[joined] / math.log(2)).to(part_lse.dtype)


def merge_parts(
    out: torch.Tensor,  # [rows, heads, v_dim]
    part_out: torch.Tensor,  # [parts, heads, v_dim]
    part_lse: torch.Tensor,  # [parts, heads]  log2
    work: WorkLists,
    *,
    sinks: torch.Tensor | None = None,  # [heads]
) -> None:
    """Join each row's parts. With sinks the lists must have been built with ``direct=False``."""
    begin = work.row_parts[: len(out) + 1].long()
    counts = begin.diff()  # [rows]
    rows = torch.arange(len(out), device=out.device)
    if sinks is None:
        rows = rows[counts != 1]  # the only item of such a row has written the output
    counts = counts[rows]
    owner = torch.repeat_interleave(torch.arange(len(rows), device=out.device), counts)  # [parts that are joined]
    nth = torch.arange(len(owner), device=out.device) - (counts.cumsum(0) - counts)[owner]
    part = begin[rows][owner] + nth
    lse = part_lse[part] * math.log(2)
    peak = lse.new_full((len(rows), out.shape[1]), -torch.inf)
    peak.scatter_reduce_(0, owner[:, None].expand_as(lse), lse, "amax")
    peak = torch.where(peak == -torch.inf, 0.0, peak)  # a row that saw nothing: any finite number does
    weights = torch.exp(lse - peak[owner])
    total = torch.zeros_like(peak).index_add_(0, owner, weights)
    joined = part_out.new_zeros(len(rows), *out.shape[1:])
    joined.index_add_(0, owner, part_out[part] * weights.to(part_out.dtype).unsqueeze(-1))
    joined /= torch.where(total > 0, total, 1.0).unsqueeze(-1)
    if sinks is not None:
        apply_sinks(joined, peak + total.log(), sinks)
    out[rows] = joined.to(out.dtype)
