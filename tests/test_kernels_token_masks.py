"""The kernel of ``token_masks_triton`` against its plain reference, and the reference against what it is to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support_kernels import DEVICE, draw, kernel, plain

from hf_batchllm.kernels.reference import token_masks_torch
from hf_batchllm.kernels.triton import token_masks_triton

NAN = float("nan")


def random_bits(rng: np.random.Generator, lines: int, vocabulary: int) -> torch.Tensor:
    """Of few tokens, of most, of none or of all."""
    bits = np.packbits(rng.random((lines, -(-vocabulary // 32), 4, 8)) < rng.choice([0, 0.02, 0.9, 1]), axis=-1)
    return torch.from_numpy(np.ascontiguousarray(bits[..., 0]).view(np.int32)[..., 0])


def check(seed: int, vocabulary: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(0, 7))
    logits = draw(rng, rows, vocabulary + 3, dtype=dtype)[:, :vocabulary]  # rows of a wider tensor
    logits[torch.from_numpy(rng.random(logits.shape) < 2 / vocabulary)] = NAN
    lines, line = rows, None
    if seed % 2:  # more lines than there are rows with one, in any order
        lines = int(rng.integers(1, 5))
        line = torch.from_numpy(rng.integers(-1, lines, rows).astype(np.int32))
    bits = random_bits(rng, lines, vocabulary)
    expected = token_masks_torch.mask_tokens(logits, bits, line=line)
    given, line = logits.to(DEVICE, copy=True), None if line is None else line.to(DEVICE)
    made = token_masks_triton.mask_tokens(given, bits.to(DEVICE), line=line)
    assert made.dtype == dtype and torch.equal(made.cpu().nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(given.cpu().nan_to_num(7), logits.nan_to_num(7)), "the logits were written to"
    token_masks_triton.mask_tokens(given, bits.to(DEVICE), line=line, out=given)
    assert torch.equal(given.cpu().nan_to_num(7), expected.nan_to_num(7))


@kernel
@pytest.mark.parametrize("vocabulary", [1, 32, 101, 4096, 5003])
@pytest.mark.parametrize("seed", range(6))
def test_masks(vocabulary: int, seed: int) -> None:
    check(seed, vocabulary, [torch.float32, torch.bfloat16, torch.float16][seed % 3])


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(60))
def test_masks_native(case: int) -> None:
    check(case, [1, 5003, 32000, 128_256, 151_936, 262_144][case % 6], [torch.float32, torch.bfloat16][case // 6 % 2])


@plain
def test_the_reference_allows_what_has_a_bit() -> None:
    rng = np.random.default_rng(1)
    allowed = rng.random((4, 77)) < 0.4
    bits = np.zeros((4, 3), dtype=np.uint32)
    for row, token in zip(*allowed.nonzero(), strict=True):
        bits[row, token // 32] |= np.uint32(1 << int(token % 32))
    bits[:, 2] |= np.uint32(0xFFFF0000)  # beyond the vocabulary
    words, line = torch.from_numpy(bits.view(np.int32)), torch.tensor([2, -1, 0, 2], dtype=torch.int32)
    logits = torch.randn(4, 77)
    banned = ~torch.from_numpy(allowed)
    assert torch.equal(token_masks_torch.mask_tokens(logits, words), logits.masked_fill(banned, -torch.inf))
    own = banned[[2, 0, 0, 2]]
    own[1] = False
    masked = logits.masked_fill(own, -torch.inf)
    assert torch.equal(token_masks_torch.mask_tokens(logits, words, line=line), masked)
    assert token_masks_torch.mask_tokens(logits, words, line=line, out=logits) is logits
    assert torch.equal(logits, masked)


@plain
def test_no_row_may_have_a_line() -> None:
    logits, none = torch.randn(2, 77), torch.full((2,), -1, dtype=torch.int32)
    assert torch.equal(token_masks_torch.mask_tokens(logits, torch.empty(0, 3, dtype=torch.int32), line=none), logits)
