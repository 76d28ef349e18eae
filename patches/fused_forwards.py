"""The forwards that layers run in place of their own: fewer, larger operations, with the same results.

Each ``..._forward`` function makes a ``forward`` for one module of transformers, with the same signature, following the
table of families. Submodules that are not merged are called as modules, as the layer's own code calls them: adapters,
quantised projections and hooks in them keep working.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from ..interrupts import act_on_interrupts
from .all_reduced_rows import AllReduce
from .attention_interface import CACHE_NAMES, AttentionCall, Rotation, context_in_use
from .fusable_parts import heads_of
from .fused_experts import ExpertKernels
from .fused_families import Family
from .fused_mixers import MixerKernels
from .module_types import Attention, DecoderLayer, Mlp, Norm

Forward = Callable[..., Any]
# One pair: weight, and bias if there is one. Emptying the list frees the memory, even if something still holds a
# forward that was made with it.
Merged = list[tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class FusedKernels:
    """The kernels, in Triton or as their references in PyTorch."""

    add_rms_norm: Callable[..., torch.Tensor]
    act_and_mul: Callable[..., torch.Tensor]
    experts: ExpertKernels
    mixers: MixerKernels
    all_reduce: AllReduce | None = None  # of ranks that have the model together


class Made(NamedTuple):
    """The result of a part of a layer, and the operations still due before it is added to the residual."""

    states: torch.Tensor  # [1, tokens, hidden]
    norm: Norm | None = None
    multiplier: float = 1.0
    first: torch.Tensor | None = None  # another part's result from the same input, to be added before this one
    scale: torch.Tensor | None = None  # [1]  multiplies the sum
    kept: bool = False  # whether a module that is called has been given the residual, which then stays as it is

    @property
    def more(self) -> bool:
        """Whether there is more to do than to add."""
        others = (self.norm, self.first, self.scale)
        return self.multiplier != 1 or any(each is not None for each in others)


class Residual:
    """Hands a layer's result to the next layer of the same pass before it is added to the residual.

    The tensor that goes from layer to layer is then the result alone, and the next norm adds the two.
    """

    def __init__(self) -> None:
        self._left: tuple[Made, torch.Tensor] | None = None

    def leave(self, made: Made, stream: torch.Tensor) -> torch.Tensor:
        self._left = made, stream
        return made.states

    def take(self, states: torch.Tensor) -> tuple[Made, torch.Tensor]:
        left = self._left
        if left is None or left[0].states is not states:
            raise RuntimeError(
                "something came between two layers of the model, or ran it from another thread meanwhile: "
                "pass `fuse=False` to BatchGenerator"
            )
        self._left = None
        return left

    def forget(self) -> None:
        self._left = None


def layer_forward(
    layer: DecoderLayer, family: Family, kernels: FusedKernels, residual: Residual, takes: bool, leaves: bool
) -> Forward:
    """``takes``: the layer before leaves its result unadded in ``residual``; ``leaves``: so does this layer."""
    norms = Norms(family, kernels)
    named = inspect.signature(type(layer).forward).parameters
    defaults = {name: each.default for name, each in named.items() if each.default is not each.empty}
    norm_named = cast("dict[str, Norm | None]", layer._modules).get
    # No module has an empty name: where the family has no name, there is no module.
    names = zip(family.attention_norms, family.mlp_norms, strict=True)
    before, behind = (tuple(name or "" for name in both) for both in names)

    def made(part: int, states: torch.Tensor, first: torch.Tensor | None = None) -> Made:
        """The result ``states`` of attention (part 0) or the MLP (part 1)."""
        dropout = layer._modules.get(family.dropouts[part] or "") if layer.training else None
        if dropout is not None:
            states = dropout(states)
        multiplier = 1.0 if family.multiplier is None else getattr(layer, family.multiplier)
        return Made(states, norm_named(behind[part]), multiplier, first)

    def forward(hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:  # [1, tokens, hidden]
        if takes:
            states, stream = norms.add(*residual.take(hidden_states), norm_named(before[0]))
        else:
            states, stream = norms.begin(hidden_states, norm_named(before[0]))
        mixer = layer._modules.get(family.mixer)
        if mixer is not None:
            rest = {name: value for name, value in given.items() if name not in named}
            attended = mixer(hidden_states=states, attention_mask=given.get("attention_mask"), **rest)
        else:
            # The defaults are arguments that the layer's own forward names and hands on.
            attended, _ = layer.self_attn(hidden_states=states, **(defaults | given))
        mlp = mlp_of(layer, family)
        if family.parallel:
            result = made(1, mlp(states), first=attended)
        else:
            states, stream = norms.add(made(0, attended), stream, norm_named(before[1]))
            states = mlp(states)
            result = made(1, states[0] if isinstance(states, tuple) else states)  # experts may return scores, too
        return residual.leave(result, stream) if leaves else norms.sum(result, stream)

    return forward


def mlp_of(layer: nn.Module, family: Family) -> Callable[[torch.Tensor], Any]:
    """The layer's MLP, or its experts, with an MLP beside them if there is one."""
    mlp = layer._modules.get(family.mlp)
    beside = layer._modules.get(family.beside)
    if beside is None or mlp is None:
        return cast(nn.Module, mlp or beside)
    both = mlp, beside
    return lambda states: both[0](states) + both[1](states)


def final_norm_forward(norm: Norm, family: Family, kernels: FusedKernels, residual: Residual) -> Forward:
    """For the norm behind a last layer that leaves its result unadded in ``residual``."""
    norms = Norms(family, kernels)

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        return norms.add(*residual.take(hidden_states), norm, keep=False)[0]

    return forward


class Norms:
    """Norms of a family, with the sums that come before them. Shapes are [1, tokens, hidden]."""

    def __init__(self, family: Family, kernels: FusedKernels) -> None:
        self.family = family
        self.kernels = kernels

    def begin(self, x: torch.Tensor, norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of a first layer's input, and a residual to add to."""
        if norm is None:  # then sums are new tensors
            return x, x
        return self.alone(x, norm), x.clone()  # sums are made in it, and the input may belong to another module

    def alone(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The norm of x."""
        if not _alike(x, norm.weight):
            normed: torch.Tensor = type(norm).forward(norm, x)
            return normed
        form, eps = self.family.form, self.family.eps(norm)
        return self.kernels.add_rms_norm(_flat(x), None, norm.weight, eps, form=form).view(x.shape)

    def add(
        self, made: Made, stream: torch.Tensor, norm: Norm | None, keep: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of the sum, and the sum, which replaces ``stream`` in place if it is to be kept."""
        if norm is None:
            summed = self.sum(made, stream)
            return summed, summed
        if not self._fit(made, stream, norm):
            stream = self._sum_in_torch(made, stream)
            return type(norm).forward(norm, stream), stream
        summed = torch.empty_like(stream) if made.kept and keep else stream
        return self._run(made, stream, norm.weight, self.family.eps(norm), keep, summed), summed

    def sum(self, made: Made, stream: torch.Tensor) -> torch.Tensor:
        """The sum, in new memory."""
        if self._fit(made, stream, None) and made.more:
            return self._run(made, stream, None, 0.0, keep=False)
        return self._sum_in_torch(made, stream)

    def _run(
        self,
        made: Made,
        stream: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        keep: bool,
        summed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        states, norm, multiplier, first, scale, _ = made
        out = self.kernels.add_rms_norm(
            _flat(states),
            _flat(stream),
            weight,
            eps,
            form=self.family.form,
            inner_weight=None if norm is None else norm.weight,
            inner_eps=None if norm is None else self.family.eps(norm),
            multiplier=multiplier,
            first=None if first is None else _flat(first),
            scale=scale,
            keep=keep,
            summed=None if summed is None else _flat(summed),
        )
        return out.view(states.shape)

    def _fit(self, made: Made, stream: torch.Tensor, norm: Norm | None) -> bool:
        """Whether kernels can take them: adapters, quantised projections and hooks may return any dtype or shape."""
        return (
            stream.shape == made.states.shape
            and (made.first is None or stream.shape == made.first.shape)
            and _alike(stream, made.states)
            and (norm is None or _alike(stream, norm.weight))
            and (made.norm is None or _alike(stream, made.norm.weight))
            and (made.first is None or _alike(stream, made.first))
        )

    def _sum_in_torch(self, made: Made, stream: torch.Tensor) -> torch.Tensor:
        states = made.states if made.norm is None else type(made.norm).forward(made.norm, made.states)
        if made.multiplier != 1:
            states = states * made.multiplier
        states = (stream if made.first is None else stream + made.first) + states
        if made.scale is not None:
            states *= made.scale
        return states


def attention_forward(attention: Attention, family: Family, qkv: Merged | None, kernels: FusedKernels) -> Forward:
    """Leaves the norms of heads, the rotation and the writing of K and V to the attention backend.

    ``qkv``: the merged projections; None where a single projection can be called.
    """
    own = type(attention).forward
    dim = attention.head_dim
    heads, kv_heads = heads_of(attention, family)
    norms_of_heads = family.norms_of_heads(attention)
    is_v_projected = len(family.projections(attention)) != 2

    def forward(
        hidden_states: torch.Tensor,  # [1, tokens, hidden]
        position_embeddings: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        act_on_interrupts()
        context = context_in_use()
        cached = any(kwargs.get(name) is not None for name in CACHE_NAMES)
        usual = attention_mask is None and not cached and attention.is_causal
        if context is None or not usual or len(hidden_states) != 1:  # `attention_interface` refuses the call
            kwargs |= {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
            refused: tuple[torch.Tensor, None]
            refused = own(attention, hidden_states, **kwargs)
            return refused
        if qkv is None:
            states = getattr(attention, family.qkv[0])(hidden_states)[0]  # [tokens, (heads + 2 * kv_heads) * dim]
        else:
            states = functional.linear(hidden_states[0], *qkv[0])
        if norms_of_heads == "all":
            q, k = states.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)[:2]
            for norm, part in ((attention.q_norm, q), (attention.k_norm, k)):
                kernels.add_rms_norm(part, None, norm.weight, family.eps(norm), form=family.form, out=part)
        clip = family.clip(attention)
        if clip is not None:
            states.clamp_(min=-clip, max=clip)
        gate = None
        if family.gated:
            q, k, v = states.split([2 * heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
            q, gate = q.view(len(q), heads, 2 * dim).split([dim, dim], dim=2)
            k, v = k.view(len(k), kv_heads, dim), v.view(len(v), kv_heads, dim)
        elif is_v_projected:
            q, k, v = states.view(len(states), -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        else:
            q, k = states.view(len(states), -1, dim).split([heads, kv_heads], dim=1)
            v = k
        cos, sin = (table[0] for table in position_embeddings) if family.turns(attention) else (None, None)
        rotation = Rotation(cos, sin, turn=family.turn)
        if norms_of_heads == "heads":
            q_norm, k_norm = attention.q_norm, attention.k_norm
            eps = family.eps(q_norm)
            rotation = Rotation(
                cos, sin, q_norm.weight, k_norm.weight, eps, norm=family.form, turn=family.turn, v_norm=family.v_norm
            )
        if family.q_factor is not None:
            factor = family.q_factor(attention, kwargs["position_ids"], sys.modules[family.home])
            rotation = replace(rotation, q_factor=factor.reshape(-1).to(q.dtype))
        out = context.attend(
            AttentionCall(
                layer=attention,
                q=q,
                k=k,
                v=v,
                scale=attention.scaling,
                window=family.window(attention),
                softcap=family.softcap(attention),
                sinks=family.sinks(attention),
                rotation=rotation,
            )
        )
        if gate is not None:
            out = out * gate.sigmoid()
        return _dropped(attention.o_proj(out.reshape(1, len(out), -1)), attention, family), None

    return forward


def mlp_forward(mlp: Mlp, family: Family, gate_up: Merged | None, kernels: FusedKernels, activation: str) -> Forward:
    """``gate_up``: the merged projections; None where a single projection can be called."""

    def forward(x: torch.Tensor) -> torch.Tensor:  # [1, tokens, hidden]
        both = getattr(mlp, family.gate_up[0])(x) if gate_up is None else functional.linear(x, *gate_up[0])
        product = kernels.act_and_mul(both.view(-1, both.shape[-1]), activation=activation)
        return _dropped(mlp.down_proj(product.view(*both.shape[:-1], -1)), mlp, family)

    return forward


def _dropped(result: torch.Tensor, part: nn.Module, family: Family) -> torch.Tensor:
    if family.dropped and part.training:
        return functional.dropout(result, p=getattr(part, family.dropped))
    return result


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a kernel can take both."""
    return one.dtype == other.dtype and one.is_contiguous() and other.is_contiguous()


def _flat(x: torch.Tensor) -> torch.Tensor:  # [1, tokens, hidden] -> [tokens, hidden]
    return x.view(-1, x.shape[-1])
