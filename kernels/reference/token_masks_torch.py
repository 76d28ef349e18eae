"""A plain PyTorch reference of ``token_masks_triton``: same signature, same results."""

from __future__ import annotations

import math

import torch

WORD = 32  # tokens in each word of a row's bits


def mask_tokens(
    logits: torch.Tensor,  # [rows, vocabulary] float32, bfloat16 or float16
    bits: torch.Tensor,  # [lines, vocabulary / 32, rounded up] int32  a bit for each token: whether it is allowed
    *,
    line: torch.Tensor | None = None,  # [rows] int32  each row's line, -1 for a free row; by default line i is row i's
    out: torch.Tensor | None = None,  # [rows, vocabulary], as ``logits``, and may be the same
) -> torch.Tensor:  # [rows, vocabulary]
    """Logits with -inf for each token that is not allowed. Free rows are as they were."""
    rows, vocabulary = logits.shape
    own = bits if line is None else bits[line.clamp(min=0)] if len(bits) else bits.new_full((rows, bits.shape[1]), -1)
    own = own.clone(memory_format=torch.contiguous_format)  # else a single word may have any stride
    of_bytes = own.view(torch.uint8)[:, :, None]  # a byte for eight tokens, the first one lowest
    place = torch.arange(8, dtype=torch.uint8, device=logits.device)
    banned = (of_bytes >> place & 1).view(rows, bits.shape[1] * WORD)[:, :vocabulary] == 0
    if line is not None:
        banned &= (line >= 0)[:, None]
    return torch.where(banned, -math.inf, logits) if out is None else out.copy_(logits).masked_fill_(banned, -math.inf)
