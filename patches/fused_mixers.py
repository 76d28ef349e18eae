"""The forward of gated delta nets in place of their own: one projection, and elementwise work in two kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..kernels.reference.gated_ops_torch import NormForm
from .attention_interface import CACHE_NAMES
from .state_functions import Convolution, DeltaRule, own_function, states_in_use
from .unmodified import why_not_linear, why_not_own, why_not_plain

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_RULE = "torch_chunk_gated_delta_rule"
_NORM = NormForm()


@dataclass(frozen=True)
class MixerKernels:
    """The kernels, in Triton or as their references in PyTorch."""

    decay_and_beta: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gated_norm: Callable[..., torch.Tensor]


def why_not_mixer(mixer: Any, home: str, name: str) -> str | None:
    """Why fused code may not run in place of this mixer's own; the words follow "its"."""
    why = why_not_own(mixer, home, f"{name}GatedDeltaNet")
    if why is not None:
        return f"mixer {why}"
    for part in PROJECTIONS:
        why = why_not_linear(getattr(mixer, part, None))
        if why is not None:
            return f"`{part}` {why}"
    why = why_not_plain(mixer.norm, home, f"{name}RMSNormGated")
    if why is not None:
        return f"`norm` {why}"
    why = why_not_plain(mixer.conv1d, nn.Conv1d.__module__, "Conv1d")
    if why is not None:
        return f"`conv1d` {why}"
    if getattr(mixer.norm, "activation", "silu") != "silu" or mixer.activation != "silu":
        return "activation is another than silu"
    if mixer.norm.weight.dtype != mixer.in_proj_z.weight.dtype:
        return "`norm` has a weight of another type"
    return None


def mixer_forward(
    mixer: Any, home: dict[str, Any], merged: list[tuple[torch.Tensor, torch.Tensor | None]], kernels: MixerKernels
) -> Callable[..., Any]:
    """``merged``: the four projections as one. ``home``: the names of the module in which the mixer is written."""
    own = type(mixer).forward
    heads, keys, values = mixer.num_v_heads, mixer.key_dim, mixer.value_dim
    sizes = [2 * keys + values, values, heads, heads]

    def forward(
        hidden_states: torch.Tensor,  # [1, tokens, hidden]
        attention_mask: Any = None,
        **given: Any,
    ) -> torch.Tensor:
        context = states_in_use()
        cached = any(given.get(name) is not None for name in CACHE_NAMES)
        if context is None or cached or attention_mask is not None or len(hidden_states) != 1:
            alone: torch.Tensor = own(mixer, hidden_states, attention_mask=attention_mask, **given)
            return alone
        mixed, z, b, a = functional.linear(hidden_states[0], *merged[0]).split(sizes, dim=1)
        convolution = mixer.conv1d
        mixed = context.convolve(Convolution(mixed, convolution.weight.squeeze(1), convolution.bias, mixer.activation))
        q, k, v = mixed.split([keys, keys, values], dim=1)
        q, k = (each.view(len(each), -1, mixer.head_k_dim) for each in (q, k))
        v = v.view(len(v), heads, mixer.head_v_dim)
        decay, beta = kernels.decay_and_beta(a, b, mixer.A_log, mixer.dt_bias)
        out = context.delta_rule(DeltaRule(q, k, v, decay, beta, True, own_function(home, _RULE)))
        z = z.view(len(z), heads, mixer.head_v_dim)
        gated = kernels.gated_norm(out, z, mixer.norm.weight, mixer.norm.variance_epsilon, _NORM)
        projected: torch.Tensor = mixer.out_proj(gated.view(1, len(gated), -1))
        return projected

    return forward
