"""Which parts of a model's layers are as transformers wrote them, so that fused code may run instead.

A layer has three parts: the norms with the residual (fused code then replaces the layer's own forward), attention, and
the MLP. Each is fused or left by itself: an adapter in the attention does not keep the MLP from being fused.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from .fused_families import FAMILIES, Family
from .fused_mixers import PROJECTIONS, why_not_mixer
from .merged_weights import why_not_merge, why_not_used
from .module_types import Attention, Decoder, DecoderLayer, Mlp
from .sharded_modules import local
from .unmodified import is_class, is_compiled, is_function, why_not_linear, why_not_own, why_not_plain

NORMS, ATTENTION, MIXER, MLP = "norms", "attention", "mixer", "MLP"
PARTS = (NORMS, ATTENTION, MIXER, MLP)
# The classes of activations for which there is a kernel.
_ACTIVATIONS = {
    ("transformers.activations", "SiLUActivation"): "silu",
    (nn.SiLU.__module__, "SiLU"): "silu",
    ("transformers.activations", "GELUTanh"): "gelu_tanh",
}


@dataclass
class Layer:
    module: DecoderLayer
    family: Family | None
    why_not: dict[str, str] = field(default_factory=dict)  # from a part to the obstacle
    # The MLP's owner and its name there. None where a mixture of experts, which is no obstacle, has none beside it.
    mlp_place: tuple[nn.Module, str] | None = None

    def fuses(self, part: str) -> bool:
        return part not in self.why_not and self.has(part)

    def has(self, part: str) -> bool:
        """Whether there is fused code for such a part, if nothing is in its way."""
        if part == ATTENTION:
            return self.family is not None and self.family.attention and not self.carries_a_state
        if part == MIXER:
            return self.family is not None and self.family.fused_mixer and self.carries_a_state
        return part != MLP or self.mlp_place is not None

    @property
    def carries_a_state(self) -> bool:
        """Whether it has a mixer in the place of attention."""
        return self.family is not None and self.family.mixer in self.module._modules

    @property
    def mixer(self) -> nn.Module:
        assert self.family is not None
        return cast(nn.Module, self.module._modules[self.family.mixer])

    @property
    def mlp(self) -> Mlp:
        assert self.mlp_place is not None
        owner, name = self.mlp_place
        return cast(Mlp, getattr(owner, name))

    def linears(self, part: str) -> list[nn.Linear]:
        """The projections that become one matrix product."""
        assert self.family is not None
        if part == ATTENTION:
            return [getattr(self.module.self_attn, name) for name in self.family.projections(self.module.self_attn)]
        if part == MIXER:
            return [getattr(self.mixer, name) for name in PROJECTIONS]
        return [getattr(self.mlp, name) for name in self.family.gate_up] if part == MLP else []

    def weights(self, part: str) -> list[list[torch.Tensor]]:
        """The weights to merge, then the biases if there are any."""
        linears = self.linears(part)
        if len(linears) < 2:
            return []
        weights: list[list[torch.Tensor]] = [[linear.weight for linear in linears]]
        if linears[0].bias is not None:
            weights.append([linear.bias for linear in linears])
        return weights

    def bypassed(self, part: str) -> list[tuple[nn.Module, str]]:
        """The modules that fused code replaces or relies on, each as (its parent, its name).

        A projection that is one already, and dropouts, are still called; but fused code relies on their results.
        """
        layer, family = self.module, self.family
        assert family is not None
        if part == NORMS:
            return [(layer, name) for name in (*family.norms(layer), *family.dropouts) if name is not None]
        if part == MIXER:
            return [(self.mixer, name) for name in (*PROJECTIONS, "norm", "conv1d")]
        if part == MLP:
            return [(self.mlp, name) for name in (*family.gate_up, family.activation)]
        norms = ["q_norm", "k_norm"] if family.norms_of_heads(layer.self_attn) else []
        norms += ["v_norm"] if family.v_norm else []
        return [(layer.self_attn, name) for name in (*family.projections(layer.self_attn), *norms)]


@dataclass
class Stack:
    """The layers of a model, and the norm behind them."""

    owner: Decoder
    layers: list[Layer]
    family: Family
    norm_why_not: str | None = None  # why the last norm is left as it is
    chain_why_not: str | None = None  # why each layer adds to the residual itself


def activation_of(mlp: Mlp, family: Family) -> str | None:
    return activation_kernel(getattr(mlp, family.activation))


def activation_kernel(activation: nn.Module) -> str | None:
    """The name under which kernels know an activation."""
    if getattr(getattr(activation, "act", None), "__name__", "") == "_gelu_tanh_python":
        return None  # it rounds after each step of the formula
    return _ACTIVATIONS.get((type(activation).__module__, type(activation).__name__))


def stacks(model: nn.Module) -> Iterator[Stack]:
    """The stacks of layers in a model. Changes nothing."""
    uses = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    compiled = [set(module.modules()) for module in model.modules() if is_compiled(module)]
    for owner in model.modules():
        layers = getattr(owner, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            continue
        run = layers[: getattr(getattr(owner, "config", None), "num_hidden_layers", None)]
        found = [Layer(cast(DecoderLayer, layer), _family(type(layer), "DecoderLayer")) for layer in run]
        family = _family(type(owner), "") or next((layer.family for layer in found if layer.family), None)
        if family is not None and found:
            for layer in found:
                if any(layer.module in each for each in compiled):
                    mixes = MIXER if layer.carries_a_state else ATTENTION
                    why = "the layer, or the model around it, is compiled"
                    layer.why_not = dict.fromkeys((NORMS, mixes, MLP), why)
                else:
                    layer.why_not = _why_not_layer(layer, owner, uses)
            yield Stack(
                cast(Decoder, owner),
                found,
                family,
                norm_why_not=why_not_plain(getattr(owner, "norm", None), family.home, family.norm_class),
                chain_why_not=why_not_own(owner, family.home, family.name + family.model),
            )


def _family(cls: type, ending: str) -> Family | None:
    """The family of a layer; with an empty ending, that of a class that runs the layers."""
    for base in cls.__mro__:
        for family in FAMILIES:
            if is_class(base, family.home, family.name + (ending or family.model)):
                return family
    return None


def _why_not_layer(layer: Layer, owner: nn.Module, uses: Counter[int]) -> dict[str, str]:
    module, family = layer.module, layer.family
    if family is None:
        cls = type(module)
        why = f"the layer is a {cls.__name__} of {cls.__module__.partition('.')[0]}"
        return dict.fromkeys((NORMS, ATTENTION, MLP), why)
    layer.mlp_place = _mlp_place(module, family)
    found = {NORMS: _why_not_norms(module, family, owner)}
    if layer.has(ATTENTION):
        found[ATTENTION] = _why_not_attention(layer, uses)
    if layer.has(MIXER):
        found[MIXER] = why_not_mixer(layer.mixer, family.home, family.name) or _why_not_merged(
            layer, MIXER, PROJECTIONS, uses
        )
    if layer.has(MLP):
        found[MLP] = _why_not_mlp(layer, uses)
    return {part: why for part, why in found.items() if why is not None}


def _mlp_place(layer: nn.Module, family: Family) -> tuple[nn.Module, str] | None:
    mixture = getattr(layer, family.mlp)
    if mixture is None:
        return None
    if not family.experts or not is_class(type(mixture), family.home, family.name + family.experts):
        return layer, family.mlp
    return (mixture, family.shared) if getattr(mixture, family.shared or "-", None) is not None else None


def _why_not_norms(layer: nn.Module, family: Family, owner: nn.Module) -> str | None:
    why = why_not_plain(layer, family.home, f"{family.name}DecoderLayer")
    if why is not None:
        return f"the layer {why}"
    config = getattr(owner, "config", None)
    if getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False):
        return "the model's config asks for hidden states or attentions"
    for name in family.norms(layer):
        why = _why_not_norm(layer, name, family)
        if why is not None:
            return why
    for dropout in family.dropouts:
        if dropout is not None:
            why = why_not_plain(getattr(layer, dropout, None), nn.Dropout.__module__, "Dropout")
            if why is not None:
                return f"`{dropout}` {why}"
    return None


def _why_not_norm(owner: nn.Module, name: str, family: Family) -> str | None:
    norm = getattr(owner, name, None)
    why = why_not_plain(norm, family.home, family.norm_class)
    if why is None:
        weight = getattr(norm, "weight", None)
        why = None if weight is None else why_not_used(weight)
        why = None if why is None else f"has a weight that {why}"
    return None if why is None else f"`{name}` {why}"


def _why_not_attention(layer: Layer, uses: Counter[int]) -> str | None:
    attention, family = layer.module.self_attn, layer.family
    assert family is not None
    why = why_not_own(attention, family.home, f"{family.name}Attention")
    if why is not None:
        return f"`self_attn` {why}"
    rotary = getattr(sys.modules[family.home], "apply_rotary_pos_emb", None)
    # With the package `kernels` installed, transformers itself turns the function into a module.
    if not is_function(rotary, family.home, "apply_rotary_pos_emb") and not hasattr(rotary, "kernel_layer_name"):
        return "its rotary embedding has been replaced"
    why = family.why_not_attention(attention)
    if why is not None:
        return why
    if family.norms_of_heads(attention):
        why = _why_not_norm(attention, "q_norm", family) or _why_not_norm(attention, "k_norm", family)
        if why is None and family.v_norm:
            why = _why_not_norm(attention, "v_norm", family)
        if why is not None:
            return why
    why = _why_not_linears(layer, ATTENTION, family.projections(attention), uses)
    if why is not None:
        return why
    linears = layer.linears(ATTENTION)
    rows = [linear.out_features if len(linears) == 1 else len(local(linear.weight)) for linear in linears]
    heads, kv_heads = heads_of(attention, family)
    of_v = 0 if len(rows) == 2 else kv_heads
    of_q = 2 * heads if family.gated else heads
    if sum(rows) != (of_q + kv_heads + of_v) * attention.head_dim or (len(rows) == 3 and rows[1] != rows[2]):
        return "its projections do not fit its heads"
    if family.norms_of_heads(attention):
        norms, dtype = [attention.q_norm, attention.k_norm], layer.linears(ATTENTION)[0].weight.dtype
        each_eps = {family.eps(norm) for norm in (*norms, *([attention.v_norm] if family.v_norm else []))}
        if len(each_eps) > 1 or any(norm.weight.dtype != dtype for norm in norms):
            return "the norms of q and k differ from each other, or from their weights"
    return None


def heads_of(attention: Attention, family: Family) -> tuple[int, int]:
    """The number of query heads and of KV heads."""
    if len(family.qkv) == 1:
        heads: int = attention.config.num_attention_heads
        return heads, attention.num_key_value_heads
    rows_of_a_head = 2 * attention.head_dim if family.gated else attention.head_dim
    q_rows, k_rows = len(local(attention.q_proj.weight)), len(local(attention.k_proj.weight))
    return q_rows // rows_of_a_head, k_rows // attention.head_dim


def _why_not_mlp(layer: Layer, uses: Counter[int]) -> str | None:
    mlp, family = layer.mlp, layer.family
    assert family is not None and layer.mlp_place is not None
    why = why_not_own(mlp, family.home, family.mlp_class.format(family.name))
    if why is not None:
        return f"`{layer.mlp_place[1]}` {why}"
    activation = type(getattr(mlp, family.activation))
    if activation_of(mlp, family) is None:
        return f"there is no kernel for the activation {activation.__name__}"
    why = why_not_plain(getattr(mlp, family.activation), activation.__module__, activation.__name__)
    if why is not None:
        return f"`{family.activation}` {why}"
    return _why_not_linears(layer, MLP, family.gate_up, uses)


def _why_not_linears(layer: Layer, part: str, names: tuple[str, ...], uses: Counter[int]) -> str | None:
    owner = layer.module.self_attn if part == ATTENTION else layer.mlp
    for name in names:
        why = why_not_linear(getattr(owner, name, None))
        if why is not None:
            return f"`{name}` {why}"
    return _why_not_merged(layer, part, names, uses)


def _why_not_merged(layer: Layer, part: str, names: tuple[str, ...], uses: Counter[int]) -> str | None:
    linears = layer.linears(part)
    if len(linears) == 1:
        why = why_not_used(linears[0].weight)
        return None if why is None else f"the weight of `{names[0]}` {why}"
    if len({linear.bias is None for linear in linears}) > 1:
        return "only some of its projections have a bias"
    for parameters in layer.weights(part):
        if any(uses[id(each)] > 1 for each in parameters):
            return f"the weights of {_listed(names)} are tied to others"
        why = why_not_merge(parameters)
        if why is not None:
            return f"the weights of {_listed(names)} {why}"
    if len({linear.weight.dtype for linear in linears} | {b.dtype for b in _biases(linears)}) > 1:
        return "its weights and biases are of different types"
    return None


def _biases(linears: list[nn.Linear]) -> list[torch.Tensor]:
    return [linear.bias for linear in linears if linear.bias is not None]


def _listed(names: tuple[str, ...]) -> str:
    quoted = [f"`{name}`" for name in names]
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}"
