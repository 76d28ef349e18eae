"""The functions that pick tokens on the device: Triton kernels, or their PyTorch twins."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingKernels:
    """The kernels, in Triton or as their twins in PyTorch."""

    greedy: Callable[..., torch.Tensor]
    gumbel_sample: Callable[..., torch.Tensor]
    cutoffs: Callable[..., torch.Tensor]
    penalise: Callable[..., torch.Tensor]
    mark_seen: Callable[..., None]
    advance: Callable[..., None]


def triton_sampling() -> SamplingKernels:
    from ..kernels import cut_triton, past_triton, sample_triton

    return SamplingKernels(
        greedy=sample_triton.greedy,
        gumbel_sample=sample_triton.gumbel_sample,
        cutoffs=cut_triton.cutoffs,
        penalise=past_triton.penalise,
        mark_seen=past_triton.mark_seen,
        advance=sample_triton.advance,
    )


def torch_sampling() -> SamplingKernels:
    from ..kernels import cut_torch, past_torch, small_torch

    return SamplingKernels(
        greedy=small_torch.greedy,
        gumbel_sample=small_torch.gumbel_sample,
        cutoffs=cut_torch.cutoffs,
        penalise=past_torch.penalise,
        mark_seen=past_torch.mark_seen,
        advance=small_torch.advance,
    )


def sampling_kernels(device: torch.device) -> SamplingKernels:
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return triton_sampling()
    return torch_sampling()
