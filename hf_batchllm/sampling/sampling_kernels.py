"""The functions that pick tokens on the device: Triton kernels, or their PyTorch twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernel_check.trust import refusal


@dataclass(frozen=True)
class SamplingKernels:
    """The kernels, in Triton or as their twins in PyTorch."""

    greedy: Callable[..., torch.Tensor]
    gumbel_sample: Callable[..., torch.Tensor]
    cutoffs: Callable[..., torch.Tensor]
    penalise: Callable[..., torch.Tensor]
    mark_seen: Callable[..., None]
    advance: Callable[..., None]
    mask_tokens: Callable[..., torch.Tensor]


def triton_sampling() -> SamplingKernels:
    from ..kernels import penalties_triton, sample_triton, token_masks_triton, top_k_top_p_triton

    return SamplingKernels(
        greedy=sample_triton.greedy,
        gumbel_sample=sample_triton.gumbel_sample,
        cutoffs=top_k_top_p_triton.cutoffs,
        penalise=penalties_triton.penalise,
        mark_seen=penalties_triton.mark_seen,
        advance=sample_triton.advance,
        mask_tokens=token_masks_triton.mask_tokens,
    )


def torch_sampling() -> SamplingKernels:
    from ..kernels import penalties_torch, sample_torch, token_masks_torch, top_k_top_p_torch

    return SamplingKernels(
        greedy=sample_torch.greedy,
        gumbel_sample=sample_torch.gumbel_sample,
        cutoffs=top_k_top_p_torch.cutoffs,
        penalise=penalties_torch.penalise,
        mark_seen=penalties_torch.mark_seen,
        advance=sample_torch.advance,
        mask_tokens=token_masks_torch.mask_tokens,
    )


def sampling_kernels(device: torch.device, amd: bool = False) -> SamplingKernels:
    """``amd``: whether kernels were asked for by name, without which none run on AMD's cards."""
    if device.type == "cuda" and refusal("sampling", device, amd=amd) is None:
        return triton_sampling()
    return torch_sampling()
