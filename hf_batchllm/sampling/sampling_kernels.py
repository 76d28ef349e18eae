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
    tail_cuts: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    penalise: Callable[..., torch.Tensor]
    mark_seen: Callable[..., None]
    advance: Callable[..., None]
    note_likeliest: Callable[..., None]
    edit_tokens: Callable[..., None]
    ban_repeats: Callable[..., None]
    force_tokens: Callable[..., None]
    grow_ends: Callable[..., None]
    append_tokens: Callable[..., None]
    mask_tokens: Callable[..., torch.Tensor]


def triton_sampling() -> SamplingKernels:
    from ..kernels.triton import (
        likeliest_triton,
        penalties_triton,
        sample_triton,
        tails_triton,
        token_edits_triton,
        token_masks_triton,
        top_k_top_p_triton,
    )

    return SamplingKernels(
        greedy=sample_triton.greedy,
        gumbel_sample=sample_triton.gumbel_sample,
        cutoffs=top_k_top_p_triton.cutoffs,
        tail_cuts=tails_triton.tail_cuts,
        penalise=penalties_triton.penalise,
        mark_seen=penalties_triton.mark_seen,
        advance=sample_triton.advance,
        note_likeliest=likeliest_triton.note_likeliest,
        edit_tokens=token_edits_triton.edit_tokens,
        ban_repeats=token_edits_triton.ban_repeats,
        force_tokens=token_edits_triton.force_tokens,
        grow_ends=token_edits_triton.grow_ends,
        append_tokens=token_edits_triton.append_tokens,
        mask_tokens=token_masks_triton.mask_tokens,
    )


def torch_sampling() -> SamplingKernels:
    from ..kernels.reference import (
        likeliest_torch,
        penalties_torch,
        sample_torch,
        tails_torch,
        token_edits_torch,
        token_masks_torch,
        top_k_top_p_torch,
    )

    return SamplingKernels(
        greedy=sample_torch.greedy,
        gumbel_sample=sample_torch.gumbel_sample,
        cutoffs=top_k_top_p_torch.cutoffs,
        tail_cuts=tails_torch.tail_cuts,
        penalise=penalties_torch.penalise,
        mark_seen=penalties_torch.mark_seen,
        advance=sample_torch.advance,
        note_likeliest=likeliest_torch.note_likeliest,
        edit_tokens=token_edits_torch.edit_tokens,
        ban_repeats=token_edits_torch.ban_repeats,
        force_tokens=token_edits_torch.force_tokens,
        grow_ends=token_edits_torch.grow_ends,
        append_tokens=token_edits_torch.append_tokens,
        mask_tokens=token_masks_torch.mask_tokens,
    )


def sampling_kernels(device: torch.device, amd: bool = False) -> SamplingKernels:
    """``amd``: whether kernels were asked for by name, without which none run on AMD's cards."""
    if device.type == "cuda" and refusal("sampling", device, amd=amd) is None:
        return triton_sampling()
    return torch_sampling()
