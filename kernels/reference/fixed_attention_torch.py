"""Attention in plain PyTorch whose results for a row do not depend on what stands beside it, to the last bit.

A row meets its keys in parts that end at fixed positions, whatever pages they lie in and however many there are. Each
is a product of the same shape, padded by keys that are not seen, or is folded from such products, page by page. Parts
are merged in the order of their positions.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ..lists.fixed_lists import FINISHED, PART
from ..lists.work_lists import WorkLists

_LEAST = torch.finfo(torch.float32).min
KEYS = 128  # of a part on a CPU; parts end at multiples of it
_NUMBERS = 16  # 64 bytes of float32


def attend_parts(
    q: torch.Tensor,  # [pairs, heads, qk_dim]
    k: torch.Tensor,  # [pairs, keys, kv_heads, qk_dim]; or [1, ...], the same for all pairs
    v: torch.Tensor,  # [pairs, keys, kv_heads, v_dim]; or [1, ...]
    seen: torch.Tensor,  # [pairs, keys] bool
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each row against the keys of one part: weighted values, their sum of weights, the largest score.

    [pairs, heads, v_dim], [pairs, heads], [pairs, heads], in float32 or wider; the first two are still to be divided.
    """
    with torch.autocast(q.device.type, enabled=False):  # which would have products in half precision
        return _attended(q, k, v, seen, scale, softcap)


def _attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (pairs, heads), (keys, kv_heads), dim = q.shape[:2], k.shape[1:3], v.shape[3]
    exact = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (_evenly_apart(each.to(exact)) for each in (q, k, v))
    queries = q.reshape(pairs, kv_heads, heads // kv_heads, q.shape[2])
    k, v = k.expand(pairs, -1, -1, -1), v.expand(pairs, -1, -1, -1)
    # Head by head, so that nothing is copied. The layout of a product's operands does not depend on how many there are.
    scores = queries.new_empty(kv_heads, pairs, heads // kv_heads, keys)
    for head in range(kv_heads):
        torch.bmm(queries[:, head], k[:, :, head].transpose(1, 2), out=scores[head])
    scores.mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores.masked_fill_(~seen[:, None], float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak.clamp(min=_LEAST)).exp_()  # all 0 where a row sees nothing
    made = weights.new_empty(*weights.shape[:3], v.shape[3])
    for head in range(kv_heads):
        torch.bmm(weights[head], v[:, :, head], out=made[head])
    return (
        made[..., :dim].transpose(0, 1).reshape(pairs, heads, dim),
        weights.sum(-1).transpose(0, 1).reshape(pairs, heads),
        peak[..., 0].transpose(0, 1).reshape(pairs, heads),
    )


def _evenly_apart(x: torch.Tensor) -> torch.Tensor:
    """Zeros behind the numbers of a head, to whole 64 bytes: how a product adds up may depend on where a row begins."""
    lacking = -x.shape[-1] % _NUMBERS
    return pad(x, (0, lacking)) if lacking else x


class Merged:
    """The results of rows while their parts come in, in the order of positions."""

    def __init__(self, rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.total = torch.zeros(rows, heads, dtype=dtype, device=device)
        self.peak = torch.full((rows, heads), float("-inf"), dtype=dtype, device=device)
        self.out = torch.zeros(rows, heads, dim, dtype=dtype, device=device)

    def add(self, rows: torch.Tensor, made: torch.Tensor, total: torch.Tensor, peak: torch.Tensor) -> None:
        """One part of each of these ``rows``."""
        before = self.peak[rows]
        largest = torch.maximum(before, peak)
        finite = largest.clamp(min=_LEAST)  # before a row has seen a key any finite number will do
        kept, added = (before - finite).exp_(), (peak - finite).exp_()
        self.out[rows] = self.out[rows] * kept.unsqueeze(-1) + made * added.unsqueeze(-1)
        self.total[rows] = self.total[rows] * kept + total * added
        self.peak[rows] = largest

    def result(self, sinks: torch.Tensor | None = None) -> torch.Tensor:  # [rows, heads, dim]
        """0 for a row that saw nothing."""
        total = self.total
        if sinks is not None:  # logits without a value
            total = total + (sinks.to(total.dtype) - self.peak.clamp(min=_LEAST)).exp_()
        return self.out / torch.where(total > 0, total, 1.0).unsqueeze(-1)


def attend_fixed(
    tile: int,
    q: torch.Tensor,  # [rows, heads, qk_dim]
    k_pages: torch.Tensor,  # [pages, page_size, kv_heads, qk_dim]
    v_pages: torch.Tensor,  # [pages, page_size, kv_heads, v_dim]
    boxes: object,  # as the kernel reads them
    out: torch.Tensor,  # [rows, heads, v_dim]
    part_out: torch.Tensor,  # [parts, heads, v_dim]
    part_sums: torch.Tensor,  # [parts, heads, 2]
    work: WorkLists,
    lengths: torch.Tensor,  # [rows]  how many positions a row sees
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """The reference of the kernel in ``fixed_attention_triton``, item by item."""
    page_size, exact = k_pages.shape[1], torch.promote_types(q.dtype, torch.float32)
    for row, rows, begin, before, end, part, is_own, carried in work.items[tile][: int(work.counts[tile])].tolist():
        assert rows * (q.shape[1] // k_pages.shape[2]) <= tile, "an item of more lines than its tile has"
        at = torch.arange(row, row + rows, device=q.device)
        all_rows = at - row
        merged, of_part = (Merged(rows, q.shape[1], v_pages.shape[3], exact, q.device) for _ in range(2))
        first_part = work.row_parts[at].long() & (FINISHED - 1)
        for nth in range(before):
            merged.add(all_rows, part_out[first_part + nth], *part_sums[first_part + nth].unbind(-1))
        if carried >= 0:
            of_part.out[:] = part_out[first_part + carried]
            of_part.total[:], of_part.peak[:] = part_sums[first_part + carried].unbind(-1)
        for page, _, first, _ in work.entries[begin:end].tolist():
            if first % PART == 0:
                merged.add(all_rows, of_part.out, of_part.total, of_part.peak)
                of_part = Merged(rows, q.shape[1], v_pages.shape[3], exact, q.device)
            key = first + torch.arange(page_size, device=q.device)
            there = key < (lengths[at[-1]] if is_own else first + page_size)
            seen = there & (key < lengths[at, None])
            if window is not None:
                seen &= key >= lengths[at, None] - window
            # What no row sees is not even read: a free page may hold NaN, and 0 x NaN is NaN.
            k, v = (
                torch.where(there[:, None, None], pages[page], 0).expand(rows, -1, -1, -1)
                for pages in (k_pages, v_pages)
            )
            of_part.add(all_rows, *attend_parts(q[at], k, v, seen, scale, softcap))
        merged.add(all_rows, of_part.out, of_part.total, of_part.peak)
        if part < 0:
            out[at] = merged.result().to(out.dtype)
            continue
        to = first_part + part
        part_out[to] = merged.out.to(part_out.dtype)
        part_sums[to] = torch.stack([merged.total, merged.peak], -1).to(part_sums.dtype)


def merge_fixed(
    out: torch.Tensor,  # [rows, heads, v_dim]
    part_out: torch.Tensor,  # [parts, heads, v_dim]
    part_sums: torch.Tensor,  # [parts, heads, 2]
    work: WorkLists,
    *,
    sinks: torch.Tensor | None = None,  # [heads]
) -> None:
    """Fold each row's parts. With sinks the lists must have been built with ``direct=False``."""
    row_parts = work.row_parts[: len(out) + 1].long()
    begin, finished = row_parts[:-1] & (FINISHED - 1), row_parts[:-1] >= FINISHED
    counts = torch.where(finished, 0, (row_parts & (FINISHED - 1)).diff())
    rows, heads, dim = out.shape
    merged = Merged(rows, heads, dim, part_out.dtype, out.device)
    for nth in range(int(counts.max()) if len(counts) else 0):
        there = (counts > nth).nonzero()[:, 0]
        part = begin[there] + nth
        merged.add(there, part_out[part], *part_sums[part].unbind(-1))
    mine = ~finished & ((counts != 1) | (sinks is not None))  # else an item of such a row has written the output
    out[mine] = merged.result(sinks).to(out.dtype)[mine]
