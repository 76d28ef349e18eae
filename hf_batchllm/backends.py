"""Which backend runs a call's attention: the Triton kernels where they can, plain PyTorch elsewhere."""

from __future__ import annotations

import importlib.util
import os

import torch

from .attention import AttentionBackend, TorchBackend
from .config import BatchConfig
from .device_sampling import SamplingKernels, torch_sampling, triton_sampling
from .errors import ConfigError
from .kernel_attention import KernelBackend, triton_kernels
from .notices import Notices
from .patches.fused import FusedKernels, triton_fused_kernels
from .storage import KVStorage

_PAGE_SIZES = (16, 32, 64, 128)
_LEAST_CAPABILITY = (8, 0)


def check_backend(config: BatchConfig, device: torch.device, notices: Notices) -> None:
    """Refuse what was asked for and cannot be, and say so where a slow way is taken instead."""
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
    return KernelBackend(triton_kernels(), storage, device, notices)


def fused_kernels(config: BatchConfig, device: torch.device) -> FusedKernels | None:
    """What fused layers run on; None where there are to be none."""
    if not config.fuse or config.backend == "torch" or _refused(config, device) is not None:
        return None
    return triton_fused_kernels()


def _refused(config: BatchConfig, device: torch.device) -> str | None:
    """Why the kernels cannot be used, in the user's words."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and config.backend == "triton"
    if device.type != "cuda" and not interpreted:
        return f"the Triton kernels need a CUDA GPU, and the model is on {device}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (`pip install triton`)"
    if importlib.util.find_spec("triton.tools.tensor_descriptor") is None:
        return "this Triton is too old (`pip install -U triton`)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"the Triton kernels need a GPU of compute capability 8.0 or more, and {name} has less"
    if config.page_size not in _PAGE_SIZES:
        sizes = ", ".join(map(str, _PAGE_SIZES[:-1]))
        return f"the Triton kernels work with a `page_size` of {sizes} or {_PAGE_SIZES[-1]}, not {config.page_size}"
    return None


def sampling_kernels(device: torch.device) -> SamplingKernels:
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return triton_sampling()
    return torch_sampling()
