"""The attention function that transformers calls, and the context that carries a step to it.

A pass through the model runs inside ``attention_context(context)``. Each layer calls ``attention_forward``, which packs
its states into an ``AttentionCall`` and hands that to the context.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, GenerationMixin

from ..errors import UnsupportedModelError
from ..interrupts import act_on_interrupts
from .shared_kv import GivenKV

# transformers treats names that contain "flash", "sdpa" or "flex_attention" in a special way; this one must not match.
# The mask interface does not know it either, so transformers builds no attention mask at all.
ATTENTION_NAME = "hf_batchllm"
# The cache among the arguments of a forward pass: by the first name since transformers 5.24; before that by the second,
# and in layers of states by the last.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_TAKEN = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = next(name for name in CACHE_NAMES if name in _TAKEN)  # the one that `generate` passes
# Tensors that arrive beside the states and change nothing about which tokens a row sees.
_HARMLESS_TENSORS = frozenset(["position_ids", "cache_position", "logits_to_keep"])


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, qk_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, qk_dim]
    value: torch.Tensor,  # [1, kv_heads, tokens, v_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' contract: packed states in, ``[1, tokens, heads, v_dim]`` out. RoPE has been applied."""
    act_on_interrupts()
    context = context_in_use()
    if context is None:
        raise RuntimeError(
            f'attention "{ATTENTION_NAME}" only runs inside BatchGenerator.generate: was the model called from another '
            "thread (or from a hook) meanwhile? A model serves one call at a time"
        )
    name = type(module).__name__
    if attention_mask is not None and not context.takes_masks:
        raise UnsupportedModelError(f"{name} passes an attention mask of its own making; such masks are not supported")
    for given, tensor in kwargs.items():
        if isinstance(tensor, torch.Tensor) and given not in _HARMLESS_TENSORS:
            raise UnsupportedModelError(f"{name} hands `{given}` to its attention; that is not supported")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} attends in both directions; only causal attention is supported")
    if sliding_window is not None and type(sliding_window) is not int:
        sliding_window = _as_int(sliding_window, name)
    dtype = query.dtype
    if dtype != torch.float64:
        dtype = autocast_dtype(query.device) or dtype
    seen = _given_kv.get()
    source = None if seen is None else seen.source(module, key, value, dtype)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    out = context.attend(
        AttentionCall(
            layer=module,
            q=query[0].transpose(0, 1),
            k=key[0].transpose(0, 1),
            v=value[0].transpose(0, 1),
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
            mask=attention_mask,
            source=source,
        )
    )
    return out.unsqueeze(0), None


def _as_int(window: Any, name: str) -> int:
    """A window that came as another kind of number, NumPy's for one."""
    if isinstance(window, torch.Tensor) or not hasattr(window, "__index__"):
        raise UnsupportedModelError(
            f"the `sliding_window` of {name} is {window!r}, a {type(window).__name__}: make it an int of Python's"
        )
    return index(window)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast would give torch's own attention here; None outside autocast."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


_ROTATION_OPTIONS = ("q_weight", "k_weight", "eps", "norm", "turn", "v_norm", "q_factor")


@dataclass(frozen=True)
class AttentionCall:
    """One layer's call, in packed form."""

    layer: nn.Module
    q: torch.Tensor  # [tokens, heads, qk_dim]
    k: torch.Tensor  # [tokens, kv_heads, qk_dim]
    v: torch.Tensor  # [tokens, kv_heads, v_dim]
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [heads]
    mask: torch.Tensor | None = None  # only where the context takes masks
    rotation: Rotation | None = None  # None: q and k are ready
    source: nn.Module | None = None  # an earlier layer with the same K and V, which it has written to its pages


@dataclass(frozen=True)
class Rotation:
    """The norm and rotation that q and k still need: a fused layer leaves both to the code that writes the cache."""

    cos: torch.Tensor | None  # [tokens, rotary_dim]
    sin: torch.Tensor | None
    q_weight: torch.Tensor | None = None  # [qk_dim]  an RMSNorm of each head before the rotation
    k_weight: torch.Tensor | None = None
    eps: float = 1e-6
    norm: str = "llama"  # one of ``layer_ops_torch.NORM_FORMS``
    turn: str = "llama"  # one of ``layer_ops_torch.TURNS``
    v_norm: bool = False  # whether each head of v is normalised as well, without a weight
    q_factor: torch.Tensor | None = None  # [tokens]  by which q is multiplied at the end

    def options(self) -> dict[str, Any]:
        """The fields that ``rope_and_write`` takes as keyword arguments."""
        return {name: getattr(self, name) for name in _ROTATION_OPTIONS}


class AttentionContext(Protocol):
    """One pass through the model: its batch, and how all layers attend."""

    takes_masks: bool
    calls: int  # layers that have attended so far

    def attend(self, call: AttentionCall) -> torch.Tensor:  # [tokens, heads, v_dim]
        """Write the call's K and V, unless an earlier layer has, and attend."""


_context: ContextVar[AttentionContext | None] = ContextVar("hf_batchllm_attention", default=None)
_given_kv: ContextVar[GivenKV | None] = ContextVar("hf_batchllm_given_kv", default=None)


@contextmanager
def attention_context(context: AttentionContext) -> Iterator[None]:
    token, given = _context.set(context), _given_kv.set(GivenKV())
    try:
        yield
    finally:
        _context.reset(token)
        _given_kv.reset(given)


def context_in_use() -> AttentionContext | None:
    return _context.get()


AttentionInterface.register(ATTENTION_NAME, attention_forward)
