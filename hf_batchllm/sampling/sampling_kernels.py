"""The functions that pick tokens on the device: Triton kernels, or their PyTorch references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from ..kernel_check.trust import refusal

# The module of each, with ``_triton`` or ``_torch`` behind its name.
_HOMES = {
    "top_logprobs": ("note_top_logprobs",),
    "penalties": ("penalise", "mark_seen"),
    "sample": ("greedy", "gumbel_sample", "advance"),
    "typical_eta": ("typical_eta_cuts",),
    "token_edits": ("edit_tokens", "ban_repeats", "force_tokens", "grow_ends", "append_tokens"),
    "token_masks": ("mask_tokens",),
    "top_k_top_p": ("cutoffs",),
}


@dataclass(frozen=True)
class SamplingKernels:
    """The kernels, in Triton or as their references in PyTorch."""

    greedy: Callable[..., torch.Tensor]
    gumbel_sample: Callable[..., torch.Tensor]
    cutoffs: Callable[..., torch.Tensor]
    typical_eta_cuts: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    penalise: Callable[..., torch.Tensor]
    mark_seen: Callable[..., None]
    advance: Callable[..., None]
    note_top_logprobs: Callable[..., None]
    edit_tokens: Callable[..., None]
    ban_repeats: Callable[..., None]
    force_tokens: Callable[..., None]
    grow_ends: Callable[..., None]
    append_tokens: Callable[..., None]
    mask_tokens: Callable[..., torch.Tensor]


def triton_sampling() -> SamplingKernels:
    return _of("triton.{}_triton")


def torch_sampling() -> SamplingKernels:
    return _of("reference.{}_torch")


def _of(place: str) -> SamplingKernels:
    homes = {home: import_module(f"..kernels.{place.format(home)}", __package__) for home in _HOMES}
    return SamplingKernels(**{name: getattr(homes[home], name) for home, names in _HOMES.items() for name in names})


def sampling_kernels(device: torch.device, amd: bool = False) -> SamplingKernels:
    """``amd``: whether kernels were asked for by name, without which none run on AMD's cards."""
    if device.type == "cuda" and refusal("sampling", device, amd=amd) is None:
        return triton_sampling()
    return torch_sampling()
