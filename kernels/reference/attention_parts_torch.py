"""Attention in parts, in plain PyTorch: the CPU backend, and the reference for the Triton kernels.

A query row may meet its keys in several parts (each shared prefix, then what it owns). A part gives the attention
output over its keys alone and the log of the sum that the softmax divided by (LSE, natural log); ``merge_part`` joins
two parts into what one pass over all keys would give.
"""

from __future__ import annotations

import torch

EVERYTHING = 1 << 40  # a position behind all others
_DENSE_SCORES = 1 << 25  # the most scores in memory at once, where torch's fused kernel cannot be used


def write_kv(
    k: torch.Tensor,  # [tokens, kv_heads, qk_dim]
    v: torch.Tensor,  # [tokens, kv_heads, v_dim]
    k_cache: torch.Tensor,  # [slots, kv_heads, qk_dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, v_dim]
    slots: torch.Tensor,  # [tokens]
) -> None:
    """Put new K and V where the page table says."""
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)


def attend(
    q: torch.Tensor,  # [rows, heads, qk_dim]
    k: torch.Tensor,  # [keys, kv_heads, qk_dim]
    v: torch.Tensor,  # [keys, kv_heads, v_dim]
    scale: float,
    *,
    causal: bool = False,  # row i sees keys [0, i]; rows == keys
    mask: torch.Tensor | None = None,  # [rows, keys]  True where a row sees a key
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows against the same keys. Returns the output [rows, heads, v_dim] and the LSE [rows, heads].

    A row that sees no key gets output 0 and LSE -inf.
    """
    flash = _has_flash(q, v, softcap)
    if flash and mask is None:
        return _attend_flash(q, k, v, scale, causal)
    rows, keys = q.shape[0], k.shape[0]
    block = max(1, _DENSE_SCORES // (q.shape[1] * keys))
    outs, lses = [], []
    for begin in range(0, rows, block):
        end = min(begin + block, rows)
        seen = end if causal else keys  # later keys are hidden from the whole block
        part = mask[begin:end, :seen] if mask is not None else None
        if causal:
            below = torch.ones(end - begin, seen, dtype=torch.bool, device=q.device).tril(begin)
            part = below if part is None else part & below
        if flash and part is not None:
            out, lse = _attend_flash(q[begin:end], k[:seen], v[:seen], scale, False, part)
        else:
            out, lse = _attend_dense(q[None, begin:end], k[None, :seen], v[None, :seen], scale, part, softcap)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def attend_each(
    q: torch.Tensor,  # [rows, heads, qk_dim]
    k: torch.Tensor,  # [rows, keys, kv_heads, qk_dim]
    v: torch.Tensor,  # [rows, keys, kv_heads, v_dim]
    scale: float,
    *,
    mask: torch.Tensor | None = None,  # [rows, keys]
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row against keys of its own."""
    if _has_flash(q, v, softcap):
        return _attend_each_flash(q, k, v, scale, mask)
    if mask is not None:
        mask = mask[:, None]  # [rows, 1 query, keys]
    return _attend_dense(q[:, None], k, v, scale, mask, softcap)


def attend_all(
    q: torch.Tensor,  # [batch, rows, heads, qk_dim]
    k: torch.Tensor,  # [batch, keys, kv_heads, qk_dim]
    v: torch.Tensor,  # [batch, keys, kv_heads, v_dim]
    scale: float,
    mask: torch.Tensor,  # [batch, rows, keys]
    *,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of ``attend``: output [batch * rows, heads, v_dim] and LSE [batch * rows, heads]."""
    return _attend_dense(q, k, v, scale, mask, softcap)


def merge_part(
    out: torch.Tensor,  # [rows, heads, v_dim]  in place
    lse: torch.Tensor,  # [rows, heads]  in place; finite
    part_out: torch.Tensor,
    part_lse: torch.Tensor,  # may be -inf: that row saw nothing in this part
) -> None:
    """Join one more part into ``out`` and ``lse``."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_(torch.exp(lse - total).unsqueeze(-1))
    out.addcmul_(part_out.to(out.dtype), torch.exp(part_lse - total).unsqueeze(-1).to(out.dtype))
    lse.copy_(total)


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Let each head's sink (a logit without a value) take its share of the softmax, in place."""
    out.mul_(torch.sigmoid(lse - sinks.to(lse.dtype)).unsqueeze(-1).to(out.dtype))


def _has_flash(q: torch.Tensor, v: torch.Tensor, softcap: float | None) -> bool:
    """Whether torch's fused kernel can do it: several times as fast as explicit scores, and more exact in bf16."""
    return softcap is None and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _attend_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    mask: torch.Tensor | None = None,  # [rows, keys]; not with causal
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    grouped = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)  # [kv_heads, group, rows, dim]
    k, v = k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None]  # [kv_heads, 1, keys, dim]
    if causal or mask is not None:
        k, v = k.expand(-1, group, -1, -1), v.expand(-1, group, -1, -1)
    else:
        # The heads that share K and V become rows of one product: K and V are read once for all of them.
        grouped = grouped.reshape(kv_heads, 1, group * rows, dim)
    out, lse = _fused(grouped, k, v, scale, causal, mask)
    out = out.reshape(kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)
    lse = lse.reshape(kv_heads, group, rows).permute(2, 0, 1).reshape(rows, heads)
    return out, lse if mask is None else lse.masked_fill_(~mask.any(-1, keepdim=True), float("-inf"))


def _attend_each_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim)  # the heads that share K and V are rows here too
    part = mask[:, None, None] if mask is not None else None  # [rows, 1, 1, keys]
    out, lse = _fused(grouped, k.transpose(1, 2), v.transpose(1, 2), scale, False, part)
    out, lse = out.reshape(rows, heads, dim), lse.reshape(rows, heads)
    return out, lse if mask is None else lse.masked_fill_(~mask.any(-1, keepdim=True), float("-inf"))


def _fused(
    q: torch.Tensor,  # [batch, heads, rows, dim]
    k: torch.Tensor,  # [batch, heads, keys, dim]
    v: torch.Tensor,
    scale: float,
    causal: bool,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE. A row that sees no key gets output 0 and a meaningless LSE."""
    if mask is not None:
        if mask.ndim == 2:
            mask = mask[None, None]
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found: tuple[torch.Tensor, torch.Tensor] = flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return found


def _attend_dense(
    q: torch.Tensor,  # [batch, rows, heads, qk_dim]
    k: torch.Tensor,  # [batch, keys, kv_heads, qk_dim]
    v: torch.Tensor,  # [batch, keys, kv_heads, v_dim]
    scale: float,
    mask: torch.Tensor | None,  # [rows, keys] or [batch, rows, keys]
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """With explicit scores. Returns output [batch * rows, heads, v_dim] and LSE [batch * rows, heads]."""
    batch, rows, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    packed = q.reshape(batch, rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
    # In float32 from the start: a score of 10 rounded to bf16 is off by up to 0.03, and so is the weight that it gives.
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(packed.to(exact), k.permute(0, 2, 3, 1).to(exact)).mul_(scale)  # [batch, kv_heads, ..., keys]
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores = scores.view(batch, kv_heads, group, rows, -1)
        hidden = ~mask if mask.ndim == 2 else ~mask[:, None, None]
        scores.masked_fill_(hidden, float("-inf"))
        scores = scores.view(batch, kv_heads, group * rows, -1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1))  # all 0 where a row sees nothing
    out = torch.matmul(weights.to(v.dtype), v.permute(0, 2, 1, 3))  # [batch, kv_heads, group * rows, v_dim]
    out = out.view(batch, kv_heads, group, rows, -1).permute(0, 3, 1, 2, 4).reshape(batch * rows, heads, -1)
    return out, lse.view(batch, kv_heads, group, rows).permute(0, 3, 1, 2).reshape(batch * rows, heads)
