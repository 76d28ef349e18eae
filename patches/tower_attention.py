"""Attention of a vision tower over images, and windows of images, that stand one behind the other.

Towers of Qwen's kind pack all patches into one row. Without flash-attention, transformers cuts the row and attends to
each piece by itself: a page of a million pixels has eighty windows, in each of thirty layers. Here pieces of one length
are one call, which PyTorch's own attention runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .attention_swap import AttentionSwap

# transformers tells a function whose name has "flash" in it where pieces end, and cuts nothing.
TOWER_NAME = "hf_batchllm_flash_in_pieces"
_THEIR_OWN = "sdpa"  # what is replaced: the user may have chosen another one for a reason

_Pieces = list[tuple[int, torch.Tensor | None]]  # a length, and the places of all patches in pieces of it; None: all


class TowerAttention:
    """The attention of one model's tower, which attends to pieces of one length at once, if it packs them at all."""

    def __init__(self, inner: Any) -> None:
        tower: Any = getattr(inner, "visual", None)
        self._swap = AttentionSwap(tower) if isinstance(tower, nn.Module) and _packs(tower) else None
        self._tower: Any = tower

    @contextmanager
    def applied(self) -> Iterator[None]:
        if self._swap is None or self._tower.config._attn_implementation != _THEIR_OWN:
            yield
            return
        token = _known.set({})
        try:
            with self._swap.applied(TOWER_NAME):
                yield
        finally:
            _known.reset(token)


def _packs(tower: nn.Module) -> bool:
    if tower._compiled_call_impl is not None or hasattr(tower, "_orig_mod"):  # it would be compiled anew
        return False
    classes = {type(module) for module in tower.modules() if hasattr(module, "is_causal")}
    return bool(classes) and all("cu_seqlens" in inspect.signature(each.forward).parameters for each in classes)


# For each run of a tower: of tensors with the ends of pieces, these and what was made of them.
_known: ContextVar[dict[int, tuple[torch.Tensor, _Pieces]] | None] = ContextVar("hf_batchllm_pieces", default=None)


def attend_in_pieces(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, patches, dim]
    key: torch.Tensor,  # [1, heads, patches, dim]
    value: torch.Tensor,  # [1, heads, patches, dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor | None = None,  # [pieces + 1]
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' contract: ``[1, patches, heads, dim]`` comes back."""
    assert cu_seq_lens_q is not None and attention_mask is None
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    for length, places in _pieces(cu_seq_lens_q):
        q, k, v = (_in_pieces(states, length, places) for states in (query, key, value))
        attended = scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scaling
        )  # [pieces, heads, length, dim]
        packed = attended.transpose(1, 2).flatten(0, 1)  # [pieces * length, heads, dim]
        if places is None:
            return packed[None], None
        out[0].index_copy_(0, places, packed)
    return out, None


def _in_pieces(states: torch.Tensor, length: int, places: torch.Tensor | None) -> torch.Tensor:
    """[1, heads, patches, dim] -> [pieces, heads, length, dim]"""
    chosen = states[0] if places is None else states[0].index_select(1, places)
    return chosen.view(chosen.shape[0], -1, length, chosen.shape[2]).transpose(0, 1)


def _pieces(ends: torch.Tensor) -> _Pieces:
    known = _known.get()
    if known is not None and id(ends) in known:
        return known[id(ends)][1]
    bounds = ends.tolist()  # once for each run and kind of layer: the device is waited for
    by_length: dict[int, list[int]] = {}
    for begin, end in pairwise(bounds):
        if end > begin:
            by_length.setdefault(end - begin, []).append(begin)
    pieces: _Pieces = []
    for length, begins in by_length.items():
        first = torch.tensor(begins, dtype=torch.long, device=ends.device)
        within = torch.arange(length, dtype=torch.long, device=ends.device)
        pieces.append((length, (first[:, None] + within).flatten()))
    if len(pieces) == 1:
        pieces = [(pieces[0][0], None)]
    if known is not None:
        known[id(ends)] = ends, pieces
    return pieces


AttentionInterface.register(TOWER_NAME, attend_in_pieces)
