"""The digest kernel gives the number of its reference."""

from __future__ import annotations

import pytest
import torch
from support_kernels import DEVICE, kernel

from hf_batchllm.kernels.reference import digest_torch


@kernel
@pytest.mark.parametrize("size", [1, 4, 7, 4096, 4 * 2048 * 16 + 3, 300_001])
def test_the_kernel_gives_the_number_of_its_reference(size: int) -> None:
    from hf_batchllm.kernels.triton import digest_triton

    flat = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(size), dtype=torch.uint8)
    expected = digest_torch.digest(flat)
    assert int(digest_triton.digest(flat.to(DEVICE))) == int(expected)
    flat[size // 2] ^= 128
    assert int(digest_triton.digest(flat.to(DEVICE))) == int(digest_torch.digest(flat)) != int(expected)
