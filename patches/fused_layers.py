"""What a layer of Llama's shape runs instead of its own code: fewer, larger operations, with the same results.

Each of the functions here makes a ``forward`` for one module of transformers, of the same signature. Modules are called
as modules wherever their own code calls them and they are not merged into something larger: adapters, quantised
projections and hooks in there go on working.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..attention import AttentionCall, Rotation, context_in_use

Forward = Callable[..., Any]
Merged = list[torch.Tensor | None]  # weight, bias; emptied when the call is over


@dataclass(frozen=True)
class FusedKernels:
    """The kernels, in Triton or as their twins in PyTorch."""

    add_rms_norm: Callable[..., torch.Tensor]
    act_and_mul: Callable[..., torch.Tensor]


class Residual:
    """What a layer leaves to the next one of the same pass: its result, not yet added to the residual.

    The tensor that goes from layer to layer then is the result alone, and the norm that comes next adds the two.
    """

    def __init__(self) -> None:
        self._left: tuple[torch.Tensor, torch.Tensor] | None = None

    def leave(self, made: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        self._left = made, residual
        return made

    def take(self, made: torch.Tensor) -> torch.Tensor:
        left = self._left
        if left is None or left[0] is not made:
            raise RuntimeError(
                "something came between two layers of the model, or ran it from another thread meanwhile: "
                "pass `fuse=False` to BatchGenerator"
            )
        self._left = None
        return left[1]

    def forget(self) -> None:
        self._left = None


def layer_forward(layer: nn.Module, kernels: FusedKernels, residual: Residual, takes: bool, leaves: bool) -> Forward:
    """``takes``: the layer before left its result apart from the residual; ``leaves``: so does this one."""

    def forward(
        hidden_states: torch.Tensor,  # [1, tokens, hidden]
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if takes:
            stream = residual.take(hidden_states)
            hidden_states, stream = _add_and_norm(hidden_states, stream, layer.input_layernorm, kernels)
        else:
            stream = hidden_states.clone()  # it is added to in place, and the original may be somebody's
            hidden_states = _norm(hidden_states, layer.input_layernorm, kernels)
        hidden_states, _ = layer.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states, stream = _add_and_norm(hidden_states, stream, layer.post_attention_layernorm, kernels)
        hidden_states = layer.mlp(hidden_states)
        return residual.leave(hidden_states, stream) if leaves else stream + hidden_states

    return forward


def final_norm_forward(norm: nn.Module, kernels: FusedKernels, residual: Residual) -> Forward:
    """Of the norm behind a last layer that leaves its result apart from the residual."""

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        return _add_and_norm(hidden_states, residual.take(hidden_states), norm, kernels)[0]

    return forward


def attention_forward(
    attention: nn.Module, qkv: Merged, window: Callable[[Any], int | None], qk_norms: bool
) -> Forward:
    """Norms of q and k, rotation and the writing of K and V are left to whoever attends."""
    own = type(attention).forward
    dim = attention.head_dim
    heads, kv_heads = attention.q_proj.out_features // dim, attention.k_proj.out_features // dim

    def forward(
        hidden_states: torch.Tensor,  # [1, tokens, hidden]
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        context = context_in_use()
        usual = attention_mask is None and past_key_values is None and attention.is_causal
        if context is None or not usual or len(hidden_states) != 1:  # to be refused, in the words of before
            return own(attention, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        states = functional.linear(hidden_states[0], *qkv)  # [tokens, (heads + 2 * kv_heads) * dim]
        q, k, v = states.view(len(states), -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        cos, sin = position_embeddings
        rotation = Rotation(cos[0], sin[0])
        if qk_norms:
            q_norm, k_norm = attention.q_norm, attention.k_norm
            rotation = Rotation(cos[0], sin[0], q_norm.weight, k_norm.weight, q_norm.variance_epsilon)
        out = context.attend(
            AttentionCall(
                layer=attention,
                q=q,
                k=k,
                v=v,
                scale=attention.scaling,
                window=window(attention),
                softcap=None,
                sinks=None,
                rotation=rotation,
            )
        )
        return attention.o_proj(out.reshape(1, len(out), -1)), None

    return forward


def mlp_forward(mlp: nn.Module, gate_up: Merged, kernels: FusedKernels, activation: str) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:  # [1, tokens, hidden]
        both = functional.linear(x, *gate_up)  # [1, tokens, 2 * inter]
        product = kernels.act_and_mul(both.view(-1, both.shape[-1]), activation=activation)
        return mlp.down_proj(product.view(*both.shape[:-1], -1))

    return forward


def _norm(x: torch.Tensor, norm: nn.Module, kernels: FusedKernels) -> torch.Tensor:
    weight = norm.weight
    if x.dtype != weight.dtype or not x.is_contiguous():
        return type(norm).forward(norm, x)
    return kernels.add_rms_norm(_flat(x), None, weight, norm.variance_epsilon).view(x.shape)


def _add_and_norm(
    x: torch.Tensor, stream: torch.Tensor, norm: nn.Module, kernels: FusedKernels
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the sum, and the sum, which takes the place of ``stream``."""
    weight = norm.weight
    if not x.dtype == stream.dtype == weight.dtype or not x.is_contiguous() or not stream.is_contiguous():
        stream = stream + x  # adapters and quantised projections may give what they like
        return type(norm).forward(norm, stream), stream
    return kernels.add_rms_norm(_flat(x), _flat(stream), weight, norm.variance_epsilon).view(x.shape), stream


def _flat(x: torch.Tensor) -> torch.Tensor:  # [1, tokens, hidden] -> [tokens, hidden]
    return x.view(-1, x.shape[-1])
