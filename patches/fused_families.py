"""The families of models whose layers can be fused, as a table: in what each differs from Llama.

Which code a family's modules run is said here; sizes, biases, windows and scales are read off the modules. What a row
says is held against transformers' own code by ``tests/test_patches_fused.py``, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Names = tuple[str | None, str | None]


def _none(attention: Any) -> None:
    return None


def _own_window(attention: Any) -> int | None:
    return attention.sliding_window


def _config_window(attention: Any) -> int | None:
    return getattr(attention.config, "sliding_window", None)


@dataclass(frozen=True)
class Family:
    name: str  # with which its classes begin
    folder: str = ""  # in transformers; by default the name in small letters
    model: str = "Model"  # ends the name of what runs the layers
    norm: str = "RMSNorm"  # ends the name of its norms
    form: str = "llama"  # what they compute (see ``kernels.layer_ops_torch.rms_norm``)

    # The layer: the norms before and behind attention, and before and behind the MLP.
    attention_norms: Names = ("input_layernorm", None)
    mlp_norms: Names = ("post_attention_layernorm", None)
    parallel: bool = False  # attention and MLP take the same input
    multiplier: str | None = None  # the layer's name for what results are multiplied by before they are added
    dropouts: Names = (None, None)  # of the results of attention and MLP

    # Attention. A single projection is one for q, k and v already.
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    qk_norms: str = ""  # "heads": of each head by itself; "all": of all heads at once
    turn: str = "llama"  # how it rotates (see ``kernels.layer_ops_torch.rope_and_write``)
    turns: Callable[[Any], bool] = lambda attention: True  # whether this one does
    # What it passes on under these names.
    window: Callable[[Any], int | None] = _none
    softcap: Callable[[Any], float | None] = _none
    sinks: Callable[[Any], Any] = _none

    # The MLP.
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "act_fn"
    experts: str = ""  # ends the name of MLPs that are left to their own code: mixtures of experts

    @property
    def home(self) -> str:
        folder = self.folder or self.name.lower()
        return f"transformers.models.{folder}.modeling_{folder}"

    @property
    def norm_class(self) -> str:
        return self.name + self.norm

    def norms(self) -> list[str]:
        """The layer's names for them, in the order in which they are run."""
        return [name for name in (*self.attention_norms, *self.mlp_norms) if name is not None]

    def eps(self, norm: nn.Module) -> float:
        return getattr(norm, "eps" if self.form == "gemma" else "variance_epsilon")


def _sandwich(name: str, **rest: Any) -> Family:
    """Gemma since its second version: a norm before each part and one behind it."""
    return Family(
        name,
        form="gemma",
        attention_norms=("input_layernorm", "post_attention_layernorm"),
        mlp_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        window=_own_window,
        **rest,
    )


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
    Family("SmolLM3", turns=lambda attention: bool(attention.use_rope), window=_own_window),
    Family(
        "Cohere2",
        norm="LayerNorm",
        form="cohere",
        mlp_norms=(None, None),
        parallel=True,
        turn="cohere",
        turns=lambda attention: attention.sliding_window is not None,
        window=_own_window,
    ),
    Family("Qwen2Moe", folder="qwen2_moe", experts="SparseMoeBlock"),
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
)
