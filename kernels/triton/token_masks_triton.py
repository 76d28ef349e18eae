"""The tokens that a grammar allows next, applied to logits, in Triton; the reference is in ``token_masks_torch``.

A bit for each token of the vocabulary says whether it is allowed. Each row has a line of bits, or none.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl

MASK_BLOCK = 4096  # tokens of the vocabulary

_INFINITY = tl.constexpr(float("inf"))


# A line may start anywhere in a table: without this, the kernel would be compiled again for each alignment in memory.
@triton.jit(do_not_specialize_on_alignment=["line"])
def _mask_tokens(
    logits, row_stride, bits, bits_stride, line, out, out_stride,
    LINES: tl.constexpr,
    COPY: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = triton.cdiv(VOCABULARY, BLOCK)
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = row
    if LINES:
        at = tl.load(line + row).to(tl.int64)
    if COPY or at >= 0:
        word = (tl.program_id(0) % BLOCKS * (BLOCK // 32) + tl.arange(0, BLOCK // 32))[:, None]
        place = tl.arange(0, 32)[None, :]
        token = word * 32 + place
        inside = token < VOCABULARY
        words = tl.load(bits + at * bits_stride + word, mask=(word * 32 < VOCABULARY) & (at >= 0), other=-1)
        banned = ((words >> place) & 1) == 0
        if COPY:
            scores = tl.load(logits + row * row_stride + token, mask=inside & (banned == 0), other=-_INFINITY)
            tl.store(out + row * out_stride + token, scores, mask=inside)
        else:  # what is allowed stays where it is: it is neither read nor written
            nothing = tl.full([BLOCK // 32, 32], -_INFINITY, tl.float32).to(out.dtype.element_ty)
            tl.store(out + row * out_stride + token, nothing, mask=inside & banned)


def mask_tokens(
    logits: torch.Tensor,  # [rows, vocabulary] float32, bfloat16 or float16
    bits: torch.Tensor,  # [lines, vocabulary / 32, rounded up] int32  a bit for each token: whether it is allowed
    *,
    line: torch.Tensor | None = None,  # [rows] int32  each row's line, -1 for a free row; by default line i is row i's
    out: torch.Tensor | None = None,  # [rows, vocabulary], as ``logits``, and may be the same
) -> torch.Tensor:  # [rows, vocabulary]
    """Logits with -inf for each token that is not allowed. Free rows are as they were."""
    rows, vocabulary = logits.shape
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device) if out is None else out
    assert out.dtype == logits.dtype and out.shape == logits.shape
    # A device keeps no stride where there is nothing to step over.
    assert vocabulary == 1 or not rows or logits.stride(1) == out.stride(1) == 1
    assert bits.dtype == torch.int32 and bits.shape[1] == triton.cdiv(vocabulary, 32)
    assert bits.shape[1] == 1 or not len(bits) or bits.stride(1) == 1
    assert line is not None or len(bits) == rows
    if rows:
        _mask_tokens[(rows * triton.cdiv(vocabulary, MASK_BLOCK),)](
            logits, logits.stride(0), bits, bits.stride(0), logits if line is None else line, out, out.stride(0),
            LINES=line is not None, COPY=out.data_ptr() != logits.data_ptr(), VOCABULARY=vocabulary, BLOCK=MASK_BLOCK,
            num_warps=8,
        )  # fmt: skip
    return out
