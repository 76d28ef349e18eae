"""The attention that transformers calls: registered once by name, told what to do by the step that runs.

Layers reach it through transformers' ``AttentionInterface``. What the step is about comes through a context variable
rather than through the model's keyword arguments, because some architectures drop those on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from .batch import AttentionBatch
from .cascade import CascadePlan, Scratch
from .errors import UnsupportedModelError
from .kernels.attention_torch import write_kv
from .kernels.small_torch import rope_and_write
from .storage import KVStorage, autocast_dtype

# Names that contain "flash", "sdpa" or "flex_attention" mean something to transformers; this one must not. As it is
# not known to the mask interface either, transformers builds no attention mask at all.
ATTENTION_NAME = "hf_batchllm"
# Tensors that reach the function beside the states and change nothing about who attends to whom.
_HARMLESS = frozenset(["position_ids", "cache_position"])


@dataclass(frozen=True)
class Rotation:
    """What is still to be done to q and k, where a fused layer leaves it to whoever writes them to the cache."""

    cos: torch.Tensor | None  # [tokens, rotary_dim]
    sin: torch.Tensor | None
    q_weight: torch.Tensor | None = None  # [qk_dim]  an RMSNorm of each head before the rotation
    k_weight: torch.Tensor | None = None
    eps: float = 1e-6
    norm: str = "llama"  # forms that the kernels know
    turn: str = "llama"

    def options(self) -> dict[str, Any]:
        """As the kernels' keyword arguments."""
        return {name: getattr(self, name) for name in ("q_weight", "k_weight", "eps", "norm", "turn")}


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
    rotation: Rotation | None = None  # None: q and k are as they are


class AttentionContext(Protocol):
    """What a pass through the model is about, for all of its layers."""

    takes_masks: bool
    calls: int  # of layers, so far

    def attend(self, call: AttentionCall) -> torch.Tensor:  # [tokens, heads, v_dim]
        """Write the call's K and V, and attend."""


class AttentionBackend(Protocol):
    """How attention is computed: plain torch on whatever device, or kernels."""

    short_chunk: int  # prompt chunks of no more tokens are to stand before longer ones

    def prepare(self, batch: AttentionBatch) -> AttentionContext:
        """Whatever can be worked out for a step once, before its layers run."""

    def release(self) -> None:
        """Let go of the memory that is kept from one step to the next."""


class TorchBackend:
    short_chunk = 0

    def __init__(self, storage: KVStorage, device: torch.device) -> None:
        self.storage = storage
        self.device = device
        self._scratch = Scratch()

    def prepare(self, batch: AttentionBatch) -> CascadeAttention:
        return CascadeAttention(CascadePlan(batch, self.device, self._scratch), self.storage)

    def release(self) -> None:
        self._scratch.release()


def write_in_torch(
    call: AttentionCall, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Put the call's K and V into the cache. Gives q as attention wants it."""
    if call.rotation is None:
        write_kv(call.k, call.v, k_cache, v_cache, slots)
        return call.q
    q = torch.empty_like(call.q)
    turn = call.rotation
    rope_and_write(call.q, call.k, call.v, turn.cos, turn.sin, k_cache, v_cache, slots, q_out=q, **turn.options())
    return q


class CascadeAttention:
    """Runs a step's plan over the paged cache, layer by layer."""

    takes_masks = False

    def __init__(self, plan: CascadePlan, storage: KVStorage) -> None:
        self.plan = plan
        self.storage = storage
        self.calls = 0

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls += 1
        k_cache, v_cache = self.storage.of(call.layer, call.k, call.v)
        # All new K and V are written before anything is read: a suffix may attend to a prefix computed beside it.
        q = write_in_torch(call, k_cache, v_cache, self.plan.batch.slots)
        return self.plan.run(
            q,
            k_cache,
            v_cache,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )


_context: ContextVar[AttentionContext | None] = ContextVar("hf_batchllm_attention", default=None)


@contextmanager
def attention_context(context: AttentionContext) -> Iterator[None]:
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def context_in_use() -> AttentionContext | None:
    return _context.get()


def use_context(context: AttentionContext | None) -> None:
    _context.set(context)


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
        if isinstance(tensor, torch.Tensor) and given not in _HARMLESS:
            raise UnsupportedModelError(f"{name} hands `{given}` to its attention; that is not supported")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} attends in both directions; only causal attention is supported")
    dtype = query.dtype
    if dtype != torch.float64:
        dtype = autocast_dtype(query.device) or dtype
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
        )
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, attention_forward)
