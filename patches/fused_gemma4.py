"""The forward of a layer of Gemma 4: experts may run beside the MLP, inputs of each layer follow, sums are scaled."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .fused_families import Family
from .fused_forwards import Forward, FusedKernels, Made, Norms, Residual


def gemma4_layer_forward(
    layer: Any, family: Family, kernels: FusedKernels, residual: Residual, takes: bool, leaves: bool
) -> Forward:
    """The forward of a layer of Gemma 4: see ``fused_forwards.layer_forward``."""
    norms = Norms(family, kernels)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(type(layer).forward).parameters.items()
        if parameter.default is not parameter.empty and name != "per_layer_input"
    }

    def forward(hidden_states: torch.Tensor, per_layer_input: Any = None, **given: Any) -> torch.Tensor:
        if takes:
            states, stream = norms.add(*residual.take(hidden_states), layer.input_layernorm)
        else:
            states, stream = norms.begin(hidden_states, layer.input_layernorm)
        attended, _ = layer.self_attn(hidden_states=states, **(defaults | given))
        made = Made(attended, layer.post_attention_layernorm)
        states, stream = norms.add(made, stream, layer.pre_feedforward_layernorm)
        states = layer.mlp(states)
        if layer.enable_moe_block:
            states = with_experts(states, stream)
        made = Made(states, layer.post_feedforward_layernorm, kept=layer.enable_moe_block)
        if layer.hidden_size_per_layer_input:
            stream = norms.sum(made, stream)
            states = layer.act_fn(layer.per_layer_input_gate(stream)) * per_layer_input
            made = Made(layer.per_layer_projection(states), layer.post_per_layer_input_norm, kept=True)
        made = made._replace(scale=layer.layer_scalar)
        return residual.leave(made, stream) if leaves else norms.sum(made, stream)

    def with_experts(states: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """The sum of the MLP's result and of the experts', each behind a norm. All are [1, tokens, hidden]."""
        _, shares, indices = layer.router(stream.view(-1, stream.shape[-1]))
        given = norms.alone(stream, layer.pre_feedforward_layernorm_2)
        found = layer.experts(given.view(-1, stream.shape[-1]), indices, shares).view(stream.shape)
        first = norms.alone(states, layer.post_feedforward_layernorm_1)
        return norms.sum(Made(found, layer.post_feedforward_layernorm_2), first)

    return forward
