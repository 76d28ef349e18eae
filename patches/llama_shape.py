"""Models of Llama's shape, and which of their parts are as transformers made them.

A layer has three parts that are fused each for itself: the norms with the residual (which takes the layer's own code),
attention, and the MLP. An adapter in the attention does not keep the MLP from being fused.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .merged_weights import why_not_merge
from .plain import is_class, why_not_linear, why_not_own, why_not_plain

NORMS, ATTENTION, MLP = "norms", "attention", "MLP"
PARTS = (NORMS, ATTENTION, MLP)
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
# The classes of activations for which there is a kernel.
_ACTIVATIONS = {("transformers.activations", "SiLUActivation"): "silu", (nn.SiLU.__module__, "SiLU"): "silu"}


@dataclass(frozen=True)
class Family:
    """In what a family differs from Llama."""

    name: str  # with which its classes begin
    window: Callable[[Any], int | None] = lambda attention: None  # what its attention passes on as `sliding_window`
    qk_norms: bool = False

    @property
    def home(self) -> str:
        return f"transformers.models.{self.name.lower()}.modeling_{self.name.lower()}"


FAMILIES = (
    Family("Llama"),
    Family("Mistral", window=lambda attention: getattr(attention.config, "sliding_window", None)),
    Family("Qwen2", window=lambda attention: attention.sliding_window),
    Family("Qwen3", window=lambda attention: attention.sliding_window, qk_norms=True),
)


@dataclass
class Layer:
    module: nn.Module
    family: Family | None
    why_not: dict[str, str] = field(default_factory=dict)  # by part

    def linears(self, part: str) -> list[nn.Linear]:
        """Those that are merged."""
        if part == ATTENTION:
            return [getattr(self.module.self_attn, name) for name in QKV]
        return [getattr(self.module.mlp, name) for name in GATE_UP] if part == MLP else []

    def weights(self, part: str) -> list[list[nn.Parameter]]:
        """The weights, and the biases if there are any."""
        linears = self.linears(part)
        biases = [[linear.bias for linear in linears]] if linears and linears[0].bias is not None else []
        return [[linear.weight for linear in linears], *biases] if linears else []

    def bypassed(self, part: str) -> list[tuple[nn.Module, str]]:
        """Modules that are not called where the part is fused, each as (the module that has it, its name)."""
        layer = self.module
        if part == NORMS:
            return [(layer, "input_layernorm"), (layer, "post_attention_layernorm")]
        if part == MLP:
            return [(layer.mlp, name) for name in (*GATE_UP, "act_fn")]
        assert self.family is not None
        norms = ("q_norm", "k_norm") if self.family.qk_norms else ()
        return [(layer.self_attn, name) for name in (*QKV, *norms)]


@dataclass
class Stack:
    """The layers of a model, and the norm behind them."""

    owner: nn.Module
    layers: list[Layer]
    norm_why_not: str | None = None  # why the last norm is left as it is
    chain_why_not: str | None = None  # why each layer adds up its own residual


def activation_of(mlp: nn.Module) -> str | None:
    cls = type(mlp.act_fn)
    return _ACTIVATIONS.get((cls.__module__, cls.__name__))


def stacks(model: nn.Module) -> Iterator[Stack]:
    """Looks, and changes nothing."""
    uses = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    for owner in model.modules():
        layers = getattr(owner, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            continue
        run = layers[: getattr(getattr(owner, "config", None), "num_hidden_layers", None)]
        found = [Layer(layer, _family(type(layer), "DecoderLayer")) for layer in run]
        family = _family(type(owner), "Model") or next((layer.family for layer in found if layer.family), None)
        if family is not None and found:
            for layer in found:
                layer.why_not = _why_not_layer(layer, owner, uses)
            yield Stack(
                owner,
                found,
                norm_why_not=why_not_plain(getattr(owner, "norm", None), family.home, f"{family.name}RMSNorm"),
                chain_why_not=why_not_own(owner, family.home, f"{family.name}Model"),
            )


def _family(cls: type, ending: str) -> Family | None:
    for base in cls.__mro__:
        for family in FAMILIES:
            if is_class(base, family.home, family.name + ending):
                return family
    return None


def _why_not_layer(layer: Layer, owner: nn.Module, uses: Counter[int]) -> dict[str, str]:
    module, family = layer.module, layer.family
    if family is None:
        cls = type(module)
        why = f"the layer is a {cls.__name__} of {cls.__module__.partition('.')[0]}"
        return dict.fromkeys(PARTS, why)
    found = {
        NORMS: _why_not_norms(module, family, owner),
        ATTENTION: _why_not_attention(layer, uses),
        MLP: _why_not_mlp(layer, uses),
    }
    return {part: why for part, why in found.items() if why is not None}


def _why_not_norms(layer: nn.Module, family: Family, owner: nn.Module) -> str | None:
    why = why_not_plain(layer, family.home, f"{family.name}DecoderLayer")
    if why is not None:
        return f"the layer {why}"
    config = getattr(owner, "config", None)
    if getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False):
        return "the model's config asks for hidden states or attentions"
    return _why_not_norm(layer, "input_layernorm", family) or _why_not_norm(layer, "post_attention_layernorm", family)


def _why_not_norm(owner: nn.Module, name: str, family: Family) -> str | None:
    why = why_not_plain(getattr(owner, name, None), family.home, f"{family.name}RMSNorm")
    return None if why is None else f"`{name}` {why}"


def _why_not_attention(layer: Layer, uses: Counter[int]) -> str | None:
    attention, family = layer.module.self_attn, layer.family
    assert family is not None
    why = why_not_own(attention, family.home, f"{family.name}Attention")
    if why is not None:
        return f"`self_attn` {why}"
    rotary = getattr(sys.modules[family.home], "apply_rotary_pos_emb", None)
    # transformers itself makes a module of it where the package `kernels` is installed.
    if getattr(rotary, "__module__", "") != family.home and not hasattr(rotary, "kernel_layer_name"):
        return "its rotary embedding has been replaced"
    if family.qk_norms:
        why = _why_not_norm(attention, "q_norm", family) or _why_not_norm(attention, "k_norm", family)
        if why is not None:
            return why
    why = _why_not_linears(layer, ATTENTION, QKV, uses)
    if why is not None:
        return why
    q, k, v = layer.linears(ATTENTION)
    if q.out_features % attention.head_dim or k.out_features % attention.head_dim or k.out_features != v.out_features:
        return "its projections do not fit its heads"
    if family.qk_norms:
        norms = attention.q_norm, attention.k_norm
        if norms[0].variance_epsilon != norms[1].variance_epsilon or any(
            norm.weight.dtype != q.weight.dtype for norm in norms
        ):
            return "the norms of q and k differ from each other, or from their weights"
    return None


def _why_not_mlp(layer: Layer, uses: Counter[int]) -> str | None:
    mlp, family = layer.module.mlp, layer.family
    assert family is not None
    why = why_not_own(mlp, family.home, f"{family.name}MLP")
    if why is not None:
        return f"`mlp` {why}"
    activation = type(mlp.act_fn)
    if activation_of(mlp) is None:
        return f"there is no kernel for the activation {activation.__name__}"
    why = why_not_plain(mlp.act_fn, activation.__module__, activation.__name__)
    if why is not None:
        return f"`act_fn` {why}"
    return _why_not_linears(layer, MLP, GATE_UP, uses)


def _why_not_linears(layer: Layer, part: str, names: tuple[str, ...], uses: Counter[int]) -> str | None:
    owner = layer.module.self_attn if part == ATTENTION else layer.module.mlp
    for name in names:
        why = why_not_linear(getattr(owner, name, None))
        if why is not None:
            return f"`{name}` {why}"
    linears = layer.linears(part)
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
