"""The repetition penalty, and no EOS before a minimum length, in Triton; the references are in ``penalties_torch``.

A bit for each token of the vocabulary says whether a row has had it. Each row has a line of bits, or some rows have a
line of a table.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl

from ..lists.sampling_recipes import RowRecipes

PENALISE_BLOCK = 2048  # tokens of the vocabulary
MARK_BLOCK = 128  # tokens to mark

_INFINITY = tl.constexpr(float("inf"))
# These may start anywhere in a table: without this, kernels would be compiled again for each alignment in memory.
_OF_ROWS = ["line", "which", "made", "minimum"]


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def _penalise(
    logits, row_stride, seen, seen_stride, line, penalty, which, eos, made, minimum, out, out_stride,
    BY_ROW: tl.constexpr,
    LINES: tl.constexpr,
    PENALTY: tl.constexpr,
    EOS: tl.constexpr,
    SKIPS: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = triton.cdiv(VOCABULARY, BLOCK)
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    if SKIPS:  # noqa: SIM102 -- what is known when the kernel is compiled is asked first
        if tl.load(line + row) < 0:  # the row stays as it is
            return
    word = (tl.program_id(0) % BLOCKS * (BLOCK // 32) + tl.arange(0, BLOCK // 32))[:, None]
    place = tl.arange(0, 32)[None, :]
    token = word * 32 + place
    inside = token < VOCABULARY
    scores = tl.load(logits + row * row_stride + token, mask=inside, other=0.0).to(tl.float32)
    if BY_ROW:
        recipe = tl.load(which + row)
        eos += recipe * EOS
    if PENALTY:
        if BY_ROW:
            penalty = tl.load(penalty + recipe)
        at = row
        if LINES:
            at = tl.load(line + row).to(tl.int64)
        bits = tl.load(seen + at * seen_stride + word, mask=(word * 32 < VOCABULARY) & (at >= 0), other=0)
        penalised = tl.where(scores < 0, scores * penalty, tl.div_rn(scores, tl.zeros_like(scores) + penalty))
        scores = tl.where(((bits >> place) & 1) == 1, penalised, scores)
    if EOS > 0:
        short = tl.load(made + row) < tl.load(minimum + row)
        for i in tl.static_range(EOS):
            scores = tl.where(short & (token == tl.load(eos + i)), -_INFINITY, scores)
    tl.store(out + row * out_stride + token, scores, mask=inside)


def penalise(
    logits: torch.Tensor,  # [rows, vocabulary]
    *,
    seen: torch.Tensor
    | None = None,  # [lines, vocabulary / 32, rounded up] int32, a bit for each token; None: no penalty
    line: torch.Tensor | None = None,  # [rows] int32  each row's line, -1 for none; by default line i is row i's
    penalty: float = 1.0,
    by_row: RowRecipes | None = None,  # with penalties in place of ``penalty``
    eos: torch.Tensor | None = None,  # [any] int64, or [recipes, any] if ``by_row``; None: a row may end at any length
    made: torch.Tensor | None = None,  # [rows]  tokens generated so far
    minimum: torch.Tensor | None = None,  # [rows]  tokens to generate before a token of ``eos`` may come
    out: torch.Tensor | None = None,  # [rows, vocabulary] float32  may be ``logits`` itself
) -> torch.Tensor:  # [rows, vocabulary] float32
    """Logits after the repetition penalty of the tokens seen, and without EOS in rows that are not long enough yet."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device) if out is None else out
    assert logits.stride(1) == 1 and out.stride(1) == 1 and out.dtype == torch.float32
    assert seen is None or (seen.shape[1] == triton.cdiv(vocabulary, 32) and seen.stride(1) == 1)
    assert seen is None or line is not None or len(seen) == rows
    assert eos is None or (made is not None and minimum is not None and eos.is_contiguous())
    if rows:
        nothing = logits
        skips = out is logits and seen is not None and line is not None and eos is None
        _penalise[(rows * triton.cdiv(vocabulary, PENALISE_BLOCK),)](
            logits, logits.stride(0), nothing if seen is None else seen, 0 if seen is None else seen.stride(0),
            nothing if line is None else line, penalty if by_row is None else by_row.table.penalty,
            nothing if by_row is None else by_row.which, nothing if eos is None else eos,
            nothing if made is None else made, nothing if minimum is None else minimum, out, out.stride(0),
            BY_ROW=by_row is not None, LINES=line is not None, PENALTY=seen is not None,
            EOS=0 if eos is None else eos.shape[-1], SKIPS=skips, VOCABULARY=vocabulary, BLOCK=PENALISE_BLOCK,
            num_warps=8,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["line"])
def _mark_seen(
    seen, seen_stride, line, tokens, n_tokens, of_each_row, vocabulary, LINES: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + at, mask=at < n_tokens, other=-1)
    real = (token >= 0) & (token < vocabulary)
    row = (at // of_each_row).to(tl.int64)
    if LINES:
        row = tl.load(line + row, mask=real, other=-1).to(tl.int64)
        real = real & (row >= 0)
    bit = tl.full([BLOCK], 1, tl.int32) << (token % 32).to(tl.int32)
    tl.atomic_or(seen + row * seen_stride + token // 32, bit, mask=real, sem="relaxed")


def mark_seen(
    seen: torch.Tensor,  # [lines, words] int32
    tokens: torch.Tensor,  # [rows] or [rows, any] int64  negative: no token
    vocabulary: int,
    line: torch.Tensor | None = None,  # [rows] int32  as for ``penalise``
) -> None:
    """Set the bits of each row's tokens; those beyond the vocabulary have none."""
    rows = len(tokens)
    assert tokens.is_contiguous() and seen.stride(1) == 1 and (line is not None or len(seen) == rows)
    if tokens.numel():
        _mark_seen[(triton.cdiv(tokens.numel(), MARK_BLOCK),)](
            seen, seen.stride(0), tokens if line is None else line, tokens, tokens.numel(), tokens.numel() // rows,
            vocabulary, LINES=line is not None, BLOCK=MARK_BLOCK, num_warps=4,
        )  # fmt: skip
