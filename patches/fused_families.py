"""The families of models whose layers can be fused, as a table: how each differs from Llama.

A row says which code a family's modules run; sizes, biases, windows and scales are read off the modules.
``tests/test_patches_fused.py`` compares each row with transformers' own code, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .module_types import Attention

Names = tuple[str | None, str | None]


def _none(attention: Attention) -> None:
    return None


def _own_window(attention: Attention) -> int | None:
    return attention.sliding_window


def _exaone_window(attention: Attention) -> int | None:
    return attention.sliding_window if attention.is_sliding else None


def _exaone_turns(attention: Attention) -> bool:
    return attention.sliding_window is None or attention.is_sliding


def _config_window(attention: Attention) -> int | None:
    window: int | None = getattr(attention.config, "sliding_window", None)
    return window


def _llama_4_factor(attention: Attention, positions: torch.Tensor, modeling: Any) -> torch.Tensor:
    given: dict[str, Any] = attention.config.rope_parameters
    beta, longest = given.get("llama_4_scaling_beta"), given.get("original_max_position_embeddings")
    factor: torch.Tensor = modeling.get_llama_4_attn_scale(positions, beta, longest)
    return factor


@dataclass(frozen=True)
class Family:
    name: str  # its classes' names begin with it
    folder: str = ""  # in transformers; by default the name in small letters
    model: str = "Model"  # ends the name of the class that runs the layers
    norm: str = "{}RMSNorm"  # its norms' class, by the name
    form: str = "llama"  # of its norms (see ``kernels.layer_ops_torch.rms_norm``)

    # The layer: the names of the norms (before, behind) attention, and (before, behind) the MLP.
    attention_norms: Names = ("input_layernorm", None)
    mlp_norms: Names = ("post_attention_layernorm", None)
    parallel: bool = False  # attention and MLP take the same input
    multiplier: str | None = None  # the layer's attribute by which results are multiplied before they are added
    dropouts: Names = (None, None)  # names of the dropouts of the results of attention and MLP
    layer: str = "usual"  # or "gemma4" (see ``fused_gemma4``)
    mixer: str = ""  # the name of what layers have that do not attend
    fused_mixer: bool = False  # whether it is a gated delta net of the newer form (see ``fused_mixers``)
    more_norms: Callable[[Any], tuple[str, ...]] = lambda layer: ()  # names of a layer's other norms

    # Attention. A single name is one projection for q, k and v together.
    attention: bool = True  # otherwise it runs its own code
    why_not_attention: Callable[[Attention], str | None] = _none  # why this layer's does
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gated: bool = False  # each head of q is followed by a gate, which opens for the head's result
    qk_norms: str = ""  # "heads": of each head by itself; "all": of all heads at once
    has_qk_norms: Callable[[Attention], bool] = lambda attention: True  # whether this layer has them
    # The factor of each token's q, by its position; of the module in which the attention is written.
    q_factor: Callable[[Attention, torch.Tensor, Any], torch.Tensor] | None = None  # [1, tokens] -> [1, 1, tokens, 1]
    v_norm: bool = False  # each head of v is normalised as well, without a weight
    clip: Callable[[Attention], float | None] = _none  # the size to which q, k and v are cut before the rotation
    turn: str = "llama"  # how it rotates (see ``kernels.layer_ops_torch.rope_and_write``)
    turns: Callable[[Attention], bool] = lambda attention: True  # whether this layer rotates at all
    # The values that its attention passes on under these names.
    window: Callable[[Attention], int | None] = _none
    softcap: Callable[[Attention], float | None] = _none
    sinks: Callable[[Attention], torch.Tensor | None] = _none

    # The MLP.
    mlp: str = "mlp"  # the layer's name for it
    mlp_class: str = "{}MLP"  # by the name
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "act_fn"
    experts: str = ""  # ends the class name of its mixtures of experts, which stand in place of an MLP
    shared: str = ""  # the mixture's name for an MLP beside its experts
    beside: str = ""  # the layer's name for an MLP beside the mixture, which runs its own code

    # Attention's and the MLP's name for the share of their results that they drop while they are trained.
    dropped: str = ""

    @property
    def home(self) -> str:
        folder = self.folder or self.name.lower()
        return f"transformers.models.{folder}.modeling_{folder}"

    @property
    def norm_class(self) -> str:
        return self.norm.format(self.name)

    def norms_of_heads(self, attention: Attention) -> str:
        return self.qk_norms if self.qk_norms and self.has_qk_norms(attention) else ""

    def projections(self, attention: Attention) -> tuple[str, ...]:
        """Some layers of Gemma 4 take their keys for values, too."""
        return tuple(name for name in self.qkv if getattr(attention, name, self) is not None)

    def norms(self, layer: nn.Module) -> list[str]:
        """The names of a layer's norms."""
        names = (*self.attention_norms, *self.mlp_norms, *self.more_norms(layer))
        return [name for name in names if name is not None]

    def eps(self, norm: nn.Module) -> float:
        eps: float = getattr(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps")
        return eps


def _sandwich(name: str, form: str = "gemma", **rest: Any) -> Family:
    """Gemma since its second version: a norm before each part and one behind it."""
    return Family(
        name,
        form=form,
        attention_norms=("input_layernorm", "post_attention_layernorm"),
        mlp_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        window=_own_window,
        **rest,
    )


def _more_of_gemma4(layer: Any) -> tuple[str, ...]:
    of_experts = "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
    of_inputs = ("post_per_layer_input_norm",)
    return (of_experts if layer.enable_moe_block else ()) + (of_inputs if layer.hidden_size_per_layer_input else ())


def _shares_kv(attention: Attention) -> str | None:
    shares = attention.store_full_length_kv and attention.config.num_kv_shared_layers
    return "it shares its keys and values with other layers" if shares or attention.is_kv_shared_layer else None


def _norms_behind(name: str, **rest: Any) -> Family:
    """OLMo since its second version."""
    return Family(
        name,
        form="olmo",
        attention_norms=(None, "post_attention_layernorm"),
        mlp_norms=(None, "post_feedforward_layernorm"),
        qk_norms="all",
        **rest,
    )


def _glm(name: str, **rest: Any) -> Family:
    return Family(name, turn="glm", gate_up=("gate_up_proj",), activation="activation_fn", **rest)


_QWEN_EXPERTS: dict[str, Any] = {"experts": "SparseMoeBlock", "shared": "shared_expert"}

FAMILIES = (
    Family("Llama"),
    Family("Mistral", window=_config_window),
    Family("Qwen2", window=_own_window),
    Family("Qwen3", window=_own_window, qk_norms="heads"),
    Family("Ministral", window=_own_window),
    Family("Cwm", window=_own_window),
    Family("Gemma", form="gemma"),
    _sandwich("Gemma2", softcap=lambda attention: attention.attn_logit_softcapping),
    _sandwich("Gemma3", model="TextModel", qk_norms="heads"),
    _sandwich(
        "Gemma4Text",
        form="olmo",
        folder="gemma4",
        norm="Gemma4RMSNorm",
        layer="gemma4",
        more_norms=_more_of_gemma4,
        qk_norms="heads",
        v_norm=True,
        why_not_attention=_shares_kv,
    ),
    Family(
        "Phi3",
        dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
        qkv=("qkv_proj",),
        window=_config_window,
        gate_up=("gate_up_proj",),
        activation="activation_fn",
    ),
    Family("Granite", multiplier="residual_multiplier"),
    _norms_behind("Olmo2"),
    _norms_behind("Olmo3", window=_own_window),
    _norms_behind("FlexOlmo", folder="flex_olmo", experts="SparseMoeBlock"),
    Family("SmolLM3", turns=lambda attention: bool(attention.use_rope), window=_own_window),
    Family(
        "Cohere2",
        norm="{}LayerNorm",
        form="cohere",
        mlp_norms=(None, None),
        parallel=True,
        turn="cohere",
        turns=lambda attention: attention.sliding_window is not None,
        window=_own_window,
    ),
    Family("Qwen2Moe", folder="qwen2_moe", experts="SparseMoeBlock", shared="shared_expert"),
    Family("Qwen3Moe", folder="qwen3_moe", window=_own_window, qk_norms="heads", experts="SparseMoeBlock"),
    Family("Mixtral", window=_config_window, experts="SparseMoeBlock"),
    Family(
        "GptOss",
        folder="gpt_oss",
        form="olmo",
        turn="gpt_oss",
        window=_own_window,
        sinks=lambda attention: attention.sinks,
        experts="MLP",
    ),
    Family("Qwen2VL", folder="qwen2_vl", model="TextModel", window=_own_window, mlp_class="Qwen2MLP"),
    Family("Qwen2_5_VL", folder="qwen2_5_vl", model="TextModel", window=_own_window, mlp_class="Qwen2MLP"),
    Family("Qwen3VLText", folder="qwen3_vl", qk_norms="heads"),
    Family("Qwen3VLMoeText", folder="qwen3_vl_moe", qk_norms="heads", experts="SparseMoeBlock"),
    Family(
        "Glm4Moe",
        folder="glm4_moe",
        qk_norms="heads",
        has_qk_norms=lambda attention: bool(attention.use_qk_norm),
        experts="MoE",
        shared="shared_experts",
    ),
    Family(
        "Olmoe",
        window=_config_window,
        qk_norms="all",
        clip=lambda attention: attention.config.clip_qkv,
        experts="SparseMoeBlock",
    ),
    Family("DeepseekV2", folder="deepseek_v2", attention=False, experts="Moe", shared="shared_experts"),
    Family("DeepseekV3", folder="deepseek_v3", attention=False, experts="MoE", shared="shared_experts"),
    Family("Glm4MoeLite", folder="glm4_moe_lite", attention=False, experts="MoE", shared="shared_experts"),
    Family("Youtu", attention=False),
    Family("SeedOss", folder="seed_oss", dropped="residual_dropout"),
    Family(
        "Exaone4",
        attention_norms=(None, "post_attention_layernorm"),
        mlp_norms=(None, "post_feedforward_layernorm"),
        qk_norms="heads",
        turns=_exaone_turns,
        window=_exaone_window,
    ),
    Family(
        "ExaoneMoe",
        folder="exaone_moe",
        qk_norms="heads",
        turns=_exaone_turns,
        window=_exaone_window,
        experts="SparseMoEBlock",
        shared="shared_experts",
    ),
    Family(
        "GraniteMoe",
        folder="granitemoe",
        multiplier="residual_multiplier",
        mlp="block_sparse_moe",
        experts="MoE",
    ),
    Family(
        "GraniteMoeHybrid",
        folder="granitemoehybrid",
        multiplier="residual_multiplier",
        mlp="block_sparse_moe",
        experts="MoE",
        beside="shared_mlp",
        mixer="mamba",
        turns=lambda attention: attention.config.position_embedding_type == "rope",
    ),
    _glm("Glm"),
    _glm(
        "Glm4",
        attention_norms=("input_layernorm", "post_self_attn_layernorm"),
        mlp_norms=("post_attention_layernorm", "post_mlp_layernorm"),
    ),
    Family("Ernie4_5", turn="ernie"),
    Family("Ernie4_5_Moe", folder="ernie4_5_moe", turn="ernie", experts="SparseMoeBlock", shared="shared_experts"),
    *[
        Family(
            name, folder=folder, model=model, form="gemma", mixer="linear_attn", gated=True, qk_norms="heads", **rest
        )
        for name, folder, model, rest in (
            ("Qwen3_5", "qwen3_5", "TextModel", {"fused_mixer": True}),
            ("Qwen3_5Moe", "qwen3_5_moe", "TextModel", {"fused_mixer": True, **_QWEN_EXPERTS}),
            ("Qwen3Next", "qwen3_next", "Model", _QWEN_EXPERTS),
        )
    ],
    Family("Ministral3", window=_config_window, q_factor=_llama_4_factor),
    Family("MiniMaxM2", folder="minimax_m2", qk_norms="all", experts="SparseMoeBlock"),
    Family("Dots1", window=_own_window, qk_norms="heads", experts="MoE", shared="shared_experts"),
    Family(
        "Phi4Multimodal",
        folder="phi4_multimodal",
        dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
        qkv=("qkv_proj",),
        window=_config_window,
        gate_up=("gate_up_proj",),
        activation="activation_fn",
    ),
)
