"""Which backend runs a call's attention: the Triton kernels where they can, plain PyTorch elsewhere."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from ..config import BatchConfig
from ..errors import ConfigError
from ..kernels.work_lists import PAGE_SIZES
from ..notices import Notices
from ..patches.fused_forwards import FusedKernels
from ..patches.fusion import triton_fused_kernels
from .attention_backend import AttentionBackend
from .kv_storage import KVStorage
from .state_step import StateKernels, in_torch
from .torch_attention import TorchBackend
from .triton_attention import TritonBackend, triton_kernels

_LEAST_CAPABILITY = (9, 0)
_LEAST_SHARED_MEMORY = 227 << 10  # bytes for each block: the widest heads need them
_SWITCHED_ON = ("1", "true", "on", "yes", "y")  # as Triton reads its environment variables


def check_backend(config: BatchConfig, device: torch.device, notices: Notices) -> None:
    """Refuse a backend that was asked for and cannot run here; warn where the slow one is taken instead."""
    if config.backend == "torch":
        reason = 'that is what `backend="torch"` asks for'
    else:
        refused = _refused(config, device)
        if refused is None:
            return
        if config.backend == "triton":
            raise ConfigError(f'`backend="triton"` cannot be used: {refused}')
        reason = refused
    if device.type != "cpu":
        notices("slow", f"attention on {device} runs in plain PyTorch, which is correct and slow: {reason}")


def make_backend(config: BatchConfig, device: torch.device, storage: KVStorage, notices: Notices) -> AttentionBackend:
    if config.backend == "torch" or _refused(config, device) is not None:
        return TorchBackend(storage, device)
    return TritonBackend(triton_kernels(interpreted=is_interpreted()), storage, device, notices)


def fused_kernels(config: BatchConfig, device: torch.device) -> FusedKernels | None:
    """The kernels that fused layers run on; None where layers are not to be fused."""
    if not config.fuse or config.backend == "torch" or _refused(config, device) is not None:
        return None
    return triton_fused_kernels()


def state_kernels(config: BatchConfig, device: torch.device) -> StateKernels:
    """What layers run on that carry a state from token to token."""
    if config.backend == "torch" or _refused(config, device) is not None:
        return in_torch()
    from ..kernels import convolution_triton, delta_rule_triton, selective_scan_triton, state_space_triton

    return StateKernels.of(
        convolution_triton.short_convolution,
        delta_rule_triton.delta_rule,
        state_space_triton.state_space,
        selective_scan_triton.selective_scan,
    )


def _refused(config: BatchConfig, device: torch.device) -> str | None:
    """Why the kernels cannot be used, in the user's words."""
    interpreted = is_interpreted()
    if device.type != "cuda" and not (interpreted and config.backend == "triton"):
        return f"the Triton kernels need a CUDA GPU, and the model is on {device}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (`pip install triton`)"
    if importlib.util.find_spec("triton.tools.tensor_descriptor") is None:
        return "this Triton is too old (`pip install -U triton`)"
    if device.type == "cuda":
        if interpreted:
            return "TRITON_INTERPRET is set, so kernels would be interpreted: unset it and start anew"
        if torch.version.hip is not None:
            return "the Triton kernels run on NVIDIA's GPUs alone"
        capability = torch.cuda.get_device_capability(device)
        properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack some of its fields
        if capability < _LEAST_CAPABILITY or properties.shared_memory_per_block_optin < _LEAST_SHARED_MEMORY:
            return (
                "the Triton kernels need a data-centre GPU of Hopper's generation (compute capability 9.0) or later, "
                f"and {properties.name} is none"
            )
    if config.page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES[:-1]))
        return f"the Triton kernels work with a `page_size` of {sizes} or {PAGE_SIZES[-1]}, not {config.page_size}"
    return None


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in _SWITCHED_ON
