"""Which kernels run a call: Triton's where the card has passed their check, torch's own or plain PyTorch elsewhere.

Each group of kernels is asked for by itself: where those for attention cannot be used, fused layers still run.
"""

from __future__ import annotations

import dataclasses

import torch

from ...config import BatchConfig
from ...errors import ConfigError, UnsupportedModelError
from ...kernel_check.comparing import is_interpreted
from ...kernel_check.trust import WORK, is_checked, refusal, unusable
from ...kernels.lists.work_lists import PAGE_SIZES
from ...notices import Notices
from ...patches.fused_forwards import FusedKernels
from ...patches.fused_mixers import MixerKernels
from ...patches.fusion import Fusion, triton_fused_kernels
from ..states.state_step import StateKernels, in_torch, in_triton
from ..unsplit_products import why_not_unsplit
from . import varlen_attention
from .attention_backend import AttentionBackend
from .fixed_attention import FixedBackend
from .fixed_triton_attention import FixedTritonBackend, triton_fixed_kernels
from .kv_storage import KVStorage
from .torch_attention import TorchBackend
from .triton_attention import TritonBackend, triton_kernels


def check_backend(config: BatchConfig, device: torch.device, notices: Notices) -> None:
    """Refuse a backend that was asked for and cannot run here; warn where the slow one is taken instead."""
    if config.invariant:
        return  # model/inspection/invariance.py has looked at it
    if config.backend == "torch":
        reason = 'that is what `backend="torch"` asks for'
    else:
        refused = _refused(config, device)
        if refused is None:
            return
        if config.backend == "triton":
            raise ConfigError(f'`backend="triton"` cannot be used: {refused}')
        reason = refused
    if config.backend != "torch" and varlen_attention.why_not(device) is None:
        notices(
            "slow",
            f"attention on {device} runs through torch's own (torch.nn.attention.varlen), which is slower: {reason}",
        )
    elif device.type != "cpu" or unusable(device) is None:
        other = varlen_attention.failure(device) if config.backend != "torch" else None
        also = "" if other is None else f". Torch's own attention cannot be used either: {other}"
        notices("slow", f"attention on {device} runs in plain PyTorch, which is correct and slow: {reason}{also}")


def why_not_invariant(config: BatchConfig, device: torch.device) -> str | None:
    """Why this device cannot give a row the same bits in any list, in the user's words; None if nothing is known."""
    if device.type == "cpu":
        return (
            'on a CPU the Triton kernels cannot: leave `backend="triton"` out' if config.backend == "triton" else None
        )
    if device.type != "cuda":
        return f"the model is on {device}, and there are kernels for it on CUDA GPUs and CPUs alone"
    if config.backend == "torch":
        return 'on a GPU plain PyTorch cannot: leave `backend="torch"` out'
    if not config.fuse:
        return "on a GPU the sums of PyTorch's norms depend on the number of rows: leave `fuse=False` out"
    return (
        why_not_unsplit()
        or _refused(config, device)
        or _why_not("parts", config, device)
        or _why_not("layers", config, device)
        or _why_not("sampling", config, device)
    )


def make_backend(config: BatchConfig, device: torch.device, storage: KVStorage, notices: Notices) -> AttentionBackend:
    if config.invariant:
        if device.type == "cpu":
            return FixedBackend(storage, device)
        if (why := why_not_invariant(config, device)) is not None:  # a check may have failed since the call began
            raise UnsupportedModelError(f"`invariant=True` cannot be kept: {why}")
        kernels, fixed = triton_kernels(interpreted=is_interpreted()), triton_fixed_kernels()
        return FixedTritonBackend(fixed, kernels, storage, device, notices, tries_shapes=is_checked(device))
    if config.backend == "torch":
        return TorchBackend(storage, device)
    if _refused(config, device) is not None:
        if varlen_attention.why_not(device) is None:
            return varlen_attention.VarlenBackend(storage, device, notices)
        return TorchBackend(storage, device)
    kernels = triton_kernels(interpreted=is_interpreted())
    return TritonBackend(kernels, storage, device, notices, tries_shapes=is_checked(device))


def fused_kernels(config: BatchConfig, device: torch.device) -> FusedKernels | None:
    """The kernels that fused layers run on; None where layers are not to be fused."""
    if not config.fuse or not _may_run("layers", config, device):
        return None
    return triton_fused_kernels()


def without_refused(kernels: FusedKernels, fusion: Fusion, config: BatchConfig, device: torch.device) -> FusedKernels:
    """What is left of fused layers where the kernels of experts, or of layers that carry a state, cannot be used.

    A model without such layers does not wait for their check.
    """
    if device.type != "cuda" or not is_checked(device):  # then nothing is refused, and the model need not be searched
        return kernels
    if fusion.has_experts:
        fusion.experts_refused = _why_not("experts", config, device)
    if fusion.has_mixers and _why_not("states", config, device) is not None:
        from ...kernels.reference import gated_ops_torch

        references = MixerKernels(gated_ops_torch.decay_and_beta, gated_ops_torch.gated_norm)
        return dataclasses.replace(kernels, mixers=references)
    return kernels


def state_kernels(config: BatchConfig, device: torch.device) -> StateKernels:
    """What layers run on that carry a state from token to token."""
    return in_triton() if _may_run("states", config, device) else in_torch()


def warn_of_refused(groups: list[str], config: BatchConfig, device: torch.device, notices: Notices) -> None:
    """Say which kernels failed their check, beside those for attention."""
    if unusable(device, amd=config.backend == "triton") is not None:
        return
    by_reason: dict[str, list[str]] = {}
    for group in groups if config.backend != "torch" else ["sampling"]:
        reason = _why_not(group, config, device)
        if reason is not None:
            by_reason.setdefault(reason, []).append(group)
    for reason, alike in by_reason.items():
        work = ", ".join(WORK[group] for group in alike)
        notices(f"slow {alike}", f"{work} on {device}: plain PyTorch, which is correct and slow: {reason}")


def refused_groups(groups: list[str], config: BatchConfig, device: torch.device) -> list[str]:
    """The groups of kernels that cannot be used on this device, of these and of attention."""
    return [group for group in ("attention", *groups) if not _may_run(group, config, device)]


def _refused(config: BatchConfig, device: torch.device) -> str | None:
    """Why the kernels for attention cannot be used, in the user's words."""
    if is_interpreted() and device.type != "cuda" and config.backend != "triton":
        return f"the Triton kernels need a CUDA GPU, and the model is on {device}"
    if config.page_size not in PAGE_SIZES and (device.type == "cuda" or is_interpreted()):
        sizes = ", ".join(map(str, PAGE_SIZES[:-1]))
        return f"the Triton kernels work with a `page_size` of {sizes} or {PAGE_SIZES[-1]}, not {config.page_size}"
    return _why_not("attention", config, device)


def _may_run(group: str, config: BatchConfig, device: torch.device) -> bool:
    if config.backend == "torch" or (device.type != "cuda" and config.backend != "triton"):
        return False
    return _why_not(group, config, device) is None


def _why_not(group: str, config: BatchConfig, device: torch.device) -> str | None:
    return refusal(group, device, amd=config.backend == "triton")
