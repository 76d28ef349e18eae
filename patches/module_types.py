"""The parts of transformers' layers that fused code reads, for the type checker.

No module is ever an instance of these classes. Code casts a layer to them once ``fused_families`` knows its class;
which of the attributes a layer has depends on its family.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig


class Norm(nn.Module):
    weight: torch.Tensor  # [hidden] or [head_dim]


class Attention(nn.Module):
    config: PreTrainedConfig
    is_causal: bool
    head_dim: int
    num_key_value_heads: int
    scaling: float
    sliding_window: int | None
    attn_logit_softcapping: float | None
    is_sliding: bool
    use_rope: int
    use_qk_norm: bool
    is_kv_shared_layer: bool
    store_full_length_kv: bool
    sinks: torch.Tensor  # [heads]
    q_proj: nn.Linear
    k_proj: nn.Linear
    o_proj: nn.Module
    q_norm: Norm
    k_norm: Norm
    v_norm: nn.Module


class Mlp(nn.Module):
    down_proj: nn.Module


class DecoderLayer(nn.Module):
    self_attn: Attention
    mlp: Mlp


class Decoder(nn.Module):
    """The module that runs the layers."""

    layers: nn.ModuleList
    norm: Norm  # behind the last layer
