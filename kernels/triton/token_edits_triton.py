"""Changes of single logits, in Triton; the references are in ``token_edits_torch``.

Each reads a short list of tokens and touches only their logits, so it costs next to nothing beside a pass over the
vocabulary. Rows may be of several kinds, each with lists of its own.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl

from ..lists import token_edits
from ..lists.token_edits import Decays, Forced, History, TargetLists

TARGETS_BLOCK = 64
HISTORY_BLOCK = 512  # tokens
FORCE_BLOCK = 4096  # tokens of the vocabulary
APPEND_BLOCK = 128  # rows

_INFINITY = tl.constexpr(float("inf"))
_AT_ANY_LENGTH = tl.constexpr(token_edits.AT_ANY_LENGTH)
# The number of rows, or of tokens, decides on their alignment: do not compile for it.
_ANYWHERE = ["which", "made", "tokens", "begin", "of_prompt", "first_at", "last_at", "picked"]


@triton.jit(do_not_specialize=["spare"], do_not_specialize_on_alignment=_ANYWHERE)
def _edit_tokens(
    scores, row_stride, which, made, kinds, token, bias, at, sequences, added, prefix, prefix_token,
    tokens, begin, of_prompt, spare, blocks,
    KINDS: tl.constexpr,
    LOOKS_BACK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // blocks
    kind = 0
    if KINDS:
        kind = tl.load(which + row)
    first = tl.load(kinds + kind)
    target = first + tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = target < tl.load(kinds + kind + 1)
    length = tl.load(made + row).to(tl.int32)
    when = tl.load(at + target, mask=inside, other=0)
    inside = inside & ((when == _AT_ANY_LENGTH) | (when == length))
    total = tl.load(bias + target, mask=inside, other=0.0)
    if LOOKS_BACK:
        own = tl.load(begin + row).to(tl.int64)
        known = tl.load(of_prompt + row) + length
        sequence = tl.load(sequences + target, mask=inside, other=0)
        end = tl.load(sequences + target + 1, mask=inside, other=0)
        left = tl.where(own >= 0, tl.max(end - sequence, 0), 0)
        while left > 0:
            going = sequence < end
            read = tl.load(prefix + sequence, mask=going, other=0)
            count = tl.load(prefix + sequence + 1, mask=going, other=0) - read
            matches = going & (count + spare <= known)
            step = tl.full([], 0, tl.int32)
            longest = tl.max(count, 0)
            while step < longest:
                comparing = matches & (step < count)
                wanted = tl.load(prefix_token + read + step, mask=comparing, other=-1)
                has = tl.load(tokens + own + known - count + step, mask=comparing, other=-1)
                matches = matches & (wanted == has)
                step += 1
            total += tl.where(matches, tl.load(added + sequence, mask=matches, other=0.0), 0.0)
            sequence += 1
            left -= 1
    place = row.to(tl.int64) * row_stride + tl.load(token + target, mask=inside, other=0)
    score = tl.load(scores + place, mask=inside, other=0.0)
    tl.store(scores + place, tl.where(total == -_INFINITY, total, score + total), mask=inside)


def edit_tokens(
    scores: torch.Tensor,  # [rows, vocabulary] float32  is written to
    lists: TargetLists,
    which: torch.Tensor | None,  # [rows] int32  the kind of each row; None: all are of the first
    made: torch.Tensor,  # [rows]  new tokens so far
    history: History | None = None,  # where there are sequences
) -> None:
    """Add to the logits of each row's targets what its kind has for them."""
    assert scores.stride(1) == 1 and scores.dtype == torch.float32 and (history is not None or not lists.looks_back)
    if not len(scores) or not lists.most:
        return
    back = (made, made, made) if history is None else (history.tokens, history.begin, history.of_prompt)
    blocks = triton.cdiv(lists.most, TARGETS_BLOCK)
    _edit_tokens[(len(scores) * blocks,)](
        scores, scores.stride(0), made if which is None else which, made, lists.begin, lists.token, lists.bias,
        lists.at, lists.sequences, lists.added, lists.prefix, lists.prefix_token, *back, lists.spare, blocks,
        KINDS=which is not None, LOOKS_BACK=lists.looks_back, BLOCK=TARGETS_BLOCK, num_warps=2,
    )  # fmt: skip


@triton.jit
def _ban_after(scores, ids, place, size, known, end, VOCABULARY: tl.constexpr):
    """Forbid the last token of each stretch [place, place + size) before ``end`` that begins as the row ends."""
    matches = (size > 0) & (place + size <= end) & (known >= size - 1)
    step = tl.full([], 0, tl.int32)
    while step < size - 1:
        has = tl.load(ids + known + 1 - size + step, mask=known >= size - 1, other=-1)
        matches = matches & (tl.load(ids + place + step, mask=matches, other=-1) == has)
        step += 1
    banned = tl.load(ids + place + size - 1, mask=matches, other=VOCABULARY)
    nothing = tl.zeros_like(place).to(tl.float32) - _INFINITY
    tl.store(scores + banned, nothing, mask=matches & (banned < VOCABULARY))


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _ban_repeats(
    scores, row_stride, sizes, which, tokens, begin, of_prompt, made, n_kinds, blocks,
    KINDS: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // blocks
    kind = 0
    if KINDS:
        kind = tl.load(which + row)
    own = tl.load(begin + row).to(tl.int64)
    prompt = tl.load(of_prompt + row)
    known = prompt + tl.load(made + row).to(tl.int32)
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    scores += row.to(tl.int64) * row_stride
    if (own >= 0) & (tl.program_id(0) % blocks * BLOCK < known):
        _ban_after(scores, tokens + own, place, tl.load(sizes + kind), known, known, VOCABULARY)
        _ban_after(scores, tokens + own, place, tl.load(sizes + n_kinds + kind), known, prompt, VOCABULARY)


def ban_repeats(
    scores: torch.Tensor,  # [rows, vocabulary] float32  is written to
    sizes: torch.Tensor,  # [2, kinds] int32  tokens of a stretch that may not come twice; 0: any may
    which: torch.Tensor | None,  # [rows] int32  the kind of each row; None: all are of the first
    history: History,
) -> None:
    """Forbid the tokens that would complete a stretch of so many tokens that a row has had.

    ``sizes[0]`` is of stretches anywhere in the row, ``sizes[1]`` of stretches within its prompt.
    """
    assert scores.stride(1) == 1 and scores.dtype == torch.float32 and sizes.is_contiguous()
    if not len(scores):
        return
    blocks = triton.cdiv(history.most, HISTORY_BLOCK)
    _ban_repeats[(len(scores) * blocks,)](
        scores, scores.stride(0), sizes, history.begin if which is None else which, history.tokens, history.begin,
        history.of_prompt, history.made, sizes.shape[1], blocks,
        KINDS=which is not None, VOCABULARY=scores.shape[1], BLOCK=HISTORY_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _force_tokens(
    scores, row_stride, first, ends, end_token, which, made, first_at, last_at,
    KINDS: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = triton.cdiv(VOCABULARY, BLOCK)
    row = tl.program_id(0) // BLOCKS
    kind = 0
    if KINDS:
        kind = tl.load(which + row)
    length = tl.load(made + row).to(tl.int32)
    end, stop = tl.load(ends + kind), tl.load(ends + kind + 1)
    is_last = (length == tl.load(last_at + row).to(tl.int32)) & (end < stop)
    beginning = tl.load(first + kind)
    is_first = (length == tl.load(first_at + row).to(tl.int32)) & (beginning >= 0)
    if is_last | is_first:
        token = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        score = tl.where((token == beginning) & (is_last == 0), 0.0, -_INFINITY)
        while is_last & (end < stop):
            score = tl.where(token == tl.load(end_token + end), 0.0, score)
            end += 1
        tl.store(scores + row.to(tl.int64) * row_stride + token, score, mask=token < VOCABULARY)


def force_tokens(
    scores: torch.Tensor,  # [rows, vocabulary] float32  is written to
    forced: Forced,
    which: torch.Tensor | None,  # [rows] int32  the kind of each row; None: all are of the first
    made: torch.Tensor,  # [rows]  new tokens so far
    first_at: torch.Tensor,  # [rows]  the length at which the first token is forced; -1: at none
    last_at: torch.Tensor,  # [rows]  the length at which the last tokens are
) -> None:
    """Where a row's token is forced, all others get -inf, and it gets 0."""
    assert scores.stride(1) == 1 and scores.dtype == torch.float32
    rows, vocabulary = scores.shape
    if rows:
        _force_tokens[(rows * triton.cdiv(vocabulary, FORCE_BLOCK),)](
            scores, scores.stride(0), forced.first, forced.last.begin, forced.last.token,
            made if which is None else which, made, first_at, last_at,
            KINDS=which is not None, VOCABULARY=vocabulary, BLOCK=FORCE_BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _grow_ends(
    scores, row_stride, ends, end_token, start, growth, lengths, which, made, KINDS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    kind = 0
    if KINDS:
        kind = tl.load(which + row)
    beyond = tl.load(made + row).to(tl.int32) - tl.load(start + kind)
    if beyond > 0:
        factor = tl.load(growth + kind * lengths + tl.minimum(beyond, lengths) - 1)
        end, stop = tl.load(ends + kind), tl.load(ends + kind + 1)
        while end < stop:
            at = end + tl.arange(0, BLOCK)
            inside = at < stop
            place = row.to(tl.int64) * row_stride + tl.load(end_token + at, mask=inside, other=0)
            old = tl.load(scores + place, mask=inside, other=0.0)
            finite = inside & (tl.abs(old) < _INFINITY)
            tl.store(scores + place, old + tl.abs(old) * factor, mask=finite)
            end += BLOCK


def grow_ends(
    scores: torch.Tensor,  # [rows, vocabulary] float32  is written to
    decays: Decays,
    which: torch.Tensor | None,  # [rows] int32  the kind of each row; None: all are of the first
    made: torch.Tensor,  # [rows]  new tokens so far
) -> None:
    """Make it likelier that an answer ends, the longer it is."""
    assert scores.stride(1) == 1 and scores.dtype == torch.float32 and decays.growth.is_contiguous()
    if len(scores):
        _grow_ends[(len(scores),)](
            scores, scores.stride(0), decays.ends.begin, decays.ends.token, decays.start, decays.growth,
            decays.growth.shape[1], made if which is None else which, made,
            KINDS=which is not None, BLOCK=32, num_warps=1,
            enable_fp_fusion=False,  # PyTorch rounds the product before it adds it
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _append_tokens(tokens, begin, of_prompt, made, picked, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(begin + row, mask=row < rows, other=-1).to(tl.int64)
    known = tl.load(of_prompt + row, mask=own >= 0, other=0) + tl.load(made + row, mask=own >= 0, other=0).to(tl.int32)
    tl.store(tokens + own + known, tl.load(picked + row, mask=own >= 0, other=-1).to(tl.int32), mask=own >= 0)


def append_tokens(history: History, tokens: torch.Tensor) -> None:
    """Put each row's new token ([rows] int64) behind those that it has."""
    if len(tokens):
        _append_tokens[(triton.cdiv(len(tokens), APPEND_BLOCK),)](
            history.tokens, history.begin, history.of_prompt, history.made, tokens, len(tokens), BLOCK=APPEND_BLOCK,
            num_warps=4,
        )  # fmt: skip
