"""Small mixers that carry a state, one of each family of transformers, and the kernels' references as their context."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig

from hf_batchllm.kernels.lists.spans import Spans
from hf_batchllm.kernels.reference.convolution_torch import short_convolution
from hf_batchllm.kernels.reference.delta_rule_torch import delta_rule
from hf_batchllm.kernels.reference.selective_scan_torch import selective_scan
from hf_batchllm.kernels.reference.state_space_torch import state_space
from hf_batchllm.patches.state_functions import Convolution, DeltaRule, SelectiveScan, StateSpace

HIDDEN = 32
_COMMON = {
    **{"hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
_LINEAR = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "head_dim": 8},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
_MAMBA = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2},
    "mamba_chunk_size": 8,
}
# Family: (class of the mixer, its config)
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextGatedDeltaNet", _LINEAR),
    "qwen3_5": ("Qwen3_5GatedDeltaNet", _LINEAR | {"model_type": "qwen3_5_text"}),
    "qwen3_5_moe": ("Qwen3_5MoeGatedDeltaNet", _LINEAR | {"model_type": "qwen3_5_moe_text"}),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", _LINEAR | {"linear_num_key_heads": 4}),
    "kimi_linear": ("KimiLinearDeltaAttention", {"linear_num_heads": 4, "linear_head_dim": 8}),
    "bailing_hybrid": ("BailingHybridDeltaAttention", {}),
    "mamba": ("MambaMixer", {"state_size": 8}),
    "falcon_mamba": ("FalconMambaMixer", {"state_size": 8}),
    "jamba": ("JambaMambaMixer", {"mamba_d_state": 8, "mamba_dt_rank": 4}),
    "zamba": ("ZambaMambaMixer", {"mamba_d_state": 8, "n_mamba_heads": 2, "layers_block_type": ["hybrid", "hybrid"]}),
    "mamba2": (
        "Mamba2Mixer",
        {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 8, "expand": 2},
    ),
    "bamba": ("BambaMixer", _MAMBA),
    "falcon_h1": ("FalconH1Mixer", _MAMBA | {"mamba_d_ssm": 64}),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", _MAMBA),
    "nemotron_h": (
        "NemotronHMamba2Mixer",
        {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8},
    ),
    "zamba2": (
        "Zamba2MambaMixer",
        {"mamba_d_state": 8, "mamba_expand": 2, "mamba_ngroups": 2, "n_mamba_heads": 4, "chunk_size": 8}
        | {"layer_types": ["hybrid", "hybrid"]},
    ),
    "lfm2": ("Lfm2ShortConv", {}),
    "lfm3": ("Lfm3ShortConv", {}),
    "lfm2_moe": ("Lfm2MoeShortConv", {"layer_types": ["conv", "full_attention"]}),
}
MIXERS = {family: made for family, made in MIXERS.items() if family in CONFIG_MAPPING}  # some are newer than others


def mixer_of(family: str) -> nn.Module:
    name, changed = MIXERS[family]
    config = AutoConfig.for_model(**({"model_type": family} | _COMMON | changed))
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    cls = getattr(module, name)
    bare = {"initialize_mixer_weights"} & inspect.signature(cls).parameters.keys()
    mixer: nn.Module = cls(config, layer_idx=0, **dict.fromkeys(bare, False))
    for parameter in mixer.parameters():  # some are left empty for a model to fill in
        nn.init.normal_(parameter, std=0.4)
    if hasattr(module, "compute_mup_vector"):  # factors that the model puts there
        mixer.register_buffer("mup_vector", module.compute_mup_vector(config), persistent=False)
    return mixer.eval()


def run(mixer: nn.Module, states: torch.Tensor) -> torch.Tensor:  # [tokens, hidden]
    """The mixer over tokens in one row, without a cache."""
    with torch.no_grad():
        out: Any = mixer(states[None])
    return (out[0] if isinstance(out, tuple) else out)[0]


class References:
    """States of each function that a pass calls, in slots."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._kept: list[torch.Tensor] = []
        self._calls = 0
        self.spans: Spans

    def step(self, lengths: list[int], source: list[int], target: list[int]) -> None:
        self.spans, self._calls = Spans.of(lengths, source, target), 0

    def _states(self, make: Callable[..., torch.Tensor], *shape: int) -> torch.Tensor:
        if self._calls == len(self._kept):
            self._kept.append(make(self._slots, *shape))
        self._calls += 1
        return self._kept[self._calls - 1]

    def convolve(self, call: Convolution) -> torch.Tensor:
        channels, taps = call.weight.shape
        return short_convolution(
            call.x,
            call.weight,
            call.bias,
            self._states(call.x.new_zeros, taps - 1, channels),
            self.spans,
            call.activation,
        )

    def delta_rule(self, call: DeltaRule) -> torch.Tensor:
        _, heads, value_dim = call.v.shape
        states = self._states(torch.zeros, heads, call.q.shape[2], value_dim)
        return delta_rule(call.q, call.k, call.v, call.decay, call.beta, states, self.spans, call.normalise)

    def state_space(self, call: StateSpace) -> torch.Tensor:
        _, heads, head_dim = call.x.shape
        return self._by_fields(state_space, call, heads, head_dim, call.b.shape[2])

    def selective_scan(self, call: SelectiveScan) -> torch.Tensor:
        return self._by_fields(selective_scan, call, call.x.shape[1], call.b.shape[1])

    def _by_fields(self, reference: Callable[..., torch.Tensor], call: Any, *shape: int) -> torch.Tensor:
        given = {name: getattr(call, name) for name in inspect.signature(reference).parameters if hasattr(call, name)}
        return reference(**given, states=self._states(torch.zeros, *shape), spans=self.spans)
