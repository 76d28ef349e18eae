"""A zoo of tiny random models, one for each architecture that matters.

The parity tests compare this library with ``model.generate``, token by token, in float32 on the
CPU. That proves something only if the models behave like trained ones in three ways, none of
which transformers' own initialisation gives at this size: attention has to matter (an early token
changes late logits), the best logit has to be clearly the best, and the output has to depend on
the prompt. ``randomise`` (support_family_models.py) sees to that; ``test_model_families.py`` checks it.

Weights depend on the names of family and parameter alone: a family is the same model in every
process and in every version of transformers that has it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from support_family_models import Family, family
from support_reference import gaps as gaps  # what goes with the models
from support_reference import logits_of_rows as logits_of_rows
from support_reference import reference_generate as reference_generate
from support_reference import reference_steps as reference_steps
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

WINDOW = 8  # small enough that a prompt of twenty tokens has left it behind

_MLP = {"intermediate_size": 64}
_GQA = {**_MLP, "num_key_value_heads": 2}
_HEADS = {"num_key_value_heads": 2, "head_dim": 16}
_WIDE = {**_GQA, **_HEADS}  # 4 heads of 16 do not add up to the hidden size of 48: nobody may assume so
_SQUARE = {**_GQA, "hidden_size": 64}  # for configs without `head_dim`
_GLOBAL_MOE = {"num_experts": 4, "num_experts_per_tok": 2}
_MOE = {**_GLOBAL_MOE, "moe_intermediate_size": 32}
_LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MLA = {
    **_MLP,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

_FEW_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SPECIAL = {"pad_token_id": 0, "eos_token_id": 100, "bos_token_id": 1, "cls_token_id": 2, "sep_token_id": 3}


def _layers(pattern: str) -> dict[str, Any]:
    """``"SSFL"``: how many layers, and which are sliding, full or linear."""
    kinds = {"S": "sliding_attention", "F": "full_attention", "L": "linear_attention"}
    return {"num_hidden_layers": len(pattern), "layer_types": [kinds[letter] for letter in pattern]}


def _window(pattern: str, size: int = WINDOW) -> dict[str, Any]:
    return {"sliding_window": size, **_layers(pattern)}


def _two_ropes(full: float = 5e4, sliding: float = 100.0) -> dict[str, Any]:
    """Two RoPE bases so far apart that mixing them up cannot go unnoticed at 60 tokens."""
    bases = {"full_attention": full, "sliding_attention": sliding}
    return {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}}


_LONGCAT_LAYERS = {"num_layers": 2, "num_hidden_layers": 4}  # one setting; 5.17 derives neither from the other
# Two different values, so that YaRN's correction of the attention scale does not cancel.
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
_YARN |= {"mscale": 0.7, "mscale_all_dim": 0.9}
_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
_LLAMA3_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SOFTCAP = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0, "query_pre_attn_scalar": 9}
_GRANITE = {"attention_multiplier": 0.4, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0}
_GEMMA4 = {"global_head_dim": 24, "vocab_size_per_layer_input": 101, "hidden_size_per_layer_input": 16}
_GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
_GEMMA4_MOE |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}
_GEMMA3N = {"laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0], "altup_num_inputs": 3}
_GEMMA3N |= {"intermediate_size": [64] * 5, "hidden_size_per_layer_input": 16, "final_logit_softcapping": 8.0}
_GEMMA3N |= {"vocab_size_per_layer_input": 101}  # 5.17 cannot look up the ids beyond
# transformers 5.17 runs the soft-capped ones through SDPA if one lets it, and SDPA drops the soft-cap in silence.
_EAGER = {"implementation": "eager"}
# Layer norms and GELUs give every position a common direction, which would decide alone if attention spoke softly.
_BIASED = {"scale": {"o_proj": 1.5, "dense": 1.5, "c_proj": 1.5, "out_proj": 1.5, "qkv": 1.3, "bias": 0.4}}

_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
_OWN_MAMBA2 = {"n_groups": 2, "chunk_size": 16, "expand": 2}
_GATED_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
_GATED_DELTA |= {"linear_value_head_dim": 8}
_SHARED_MOE = {**_MOE, "shared_expert_intermediate_size": 32}
_NEMOTRON_H = {"mamba_num_heads": 4, "mamba_head_dim": 24, "ssm_state_size": 8, **_OWN_MAMBA2}
_NEMOTRON_H |= {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
_NEMOTRON_H |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "topk_group": 1}
_NEMOTRON_H |= {"moe_shared_expert_intermediate_size": 32, "n_group": 1, "num_hidden_layers": 4}

_JAMBA = {"mamba_d_state": 8, "mamba_d_conv": 3, "mamba_dt_rank": 4, "pad_token_id": 0}
_JAMBA |= {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2}
_ZAMBA = {"mamba_d_state": 8, "n_mamba_heads": 2, "pad_token_id": 0, "num_hidden_layers": 4}
_ZAMBA |= {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]}

FAMILIES: dict[str, Family] = dict(
    [
        # Llama, and what is a Llama to an attention function. The first has three query heads a KV head.
        family("llama", "", _WIDE, {"num_attention_heads": 6}),
        family("llama3_rope", "llama", _WIDE, {"rope_parameters": _LLAMA3_ROPE}),
        family("arcee", "", _WIDE),
        family("apertus", "", _WIDE),
        family("bitnet", "", _SQUARE),
        family("ernie4_5", "", _WIDE),
        family("glm", "", _WIDE),
        family("glm4", "", _WIDE),
        family("helium", "", _SQUARE, {"head_dim": 16}),
        family("hunyuan_v1_dense", "", _WIDE),
        family("internlm3", "", _WIDE),
        family("jais2", "", _WIDE, **_BIASED),
        family("nanochat", "", _SQUARE),
        family("olmo", "", _SQUARE, {"clip_qkv": 3.0}),
        family("olmo2", "", _SQUARE),
        family("qwen2", "", _SQUARE),
        family("qwen3", "", _WIDE, {"num_key_value_heads": 1}),
        family("seed_oss", "", _WIDE),
        family("smollm3", "", _SQUARE, {"no_rope_layers": [1, 0, 1]}),
        family("gemma", "", _WIDE, {"num_key_value_heads": 1}, embed=0.1),
        # Scales of their own.
        family("cohere", "", _SQUARE, {"logit_scale": 0.5}, head=6.0),
        family("granite", "", _SQUARE, _GRANITE, head=6.0),
        family("ministral3", "", _WIDE, {"sliding_window": WINDOW}),
        family("minicpm3", "", _MLA, {"hidden_size": 64, "scale_emb": 2, "dim_model_base": 32}, head=6.0),
        # Windows.
        family("mistral", "", _WIDE, {"num_key_value_heads": 1, "sliding_window": WINDOW}),
        family("ministral", "", _WIDE, _window("SFS")),
        family("qwen2_window", "qwen2", _SQUARE, {"use_sliding_window": True}, _window("FSS", 7)),
        family("qwen3_window", "qwen3", _WIDE, {"use_sliding_window": True}, _window("FSS", 7)),
        family("phi3", "", _SQUARE, {"sliding_window": 7}),
        family(
            "smollm3_window",
            "smollm3",
            _SQUARE,
            {"use_sliding_window": True, "no_rope_layers": [1, 0, 1]},
            _window("FSF"),
        ),
        family("starcoder2", "", _SQUARE, {"sliding_window": WINDOW}, **_BIASED),
        family("cwm", "", _WIDE, {"bos_token_id": 1}, _window("FSS")),
        family("gemma2", "", _WIDE, _SOFTCAP, _window("SFS"), embed=0.1, **_EAGER),
        family("vaultgemma", "", _WIDE, _SOFTCAP, _window("SFS", 7), embed=0.1, **_EAGER),
        family("gemma3", "gemma3_text", _WIDE, {"query_pre_attn_scalar": 4}, _window("SSF"), _two_ropes(), embed=0.1),
        family("olmo3", "", _SQUARE, _window("SSF")),
        family("cohere2", "", _SQUARE, {"logit_scale": 0.5}, _window("SSSF"), head=6.0),
        family("exaone4", "", _WIDE, _window("SSSF")),
        family(
            "gemma4",
            "gemma4_text",
            _WIDE,
            _GEMMA4,
            {"num_kv_shared_layers": 0},
            _window("SFS"),
            embed=0.1,
            scale={"q_norm": 0.5, "k_norm": 0.5},
        ),
        family(
            "gemma4_moe",
            "gemma4_text",
            _WIDE,
            _GEMMA4,
            _GEMMA4_MOE,
            _window("SFF"),
            embed=0.1,
            scale={"q_norm": 0.5, "k_norm": 0.5},
        ),
        # The last two layers attend to the K and V of the second and the third.
        family(
            "gemma4_shared",
            "gemma4_text",
            _WIDE,
            _GEMMA4,
            {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
            _window("SSFSF"),
            embed=0.1,
            scale={"q_norm": 0.5, "k_norm": 0.5},
        ),
        family("gemma3n", "gemma3n_text", _WIDE, _GEMMA3N, {"num_kv_shared_layers": 2}, _window("SSFSF"), embed=0.1),
        family(
            "modernbert_decoder",
            "modernbert-decoder",
            _MLP,
            _SPECIAL,
            {"hidden_size": 64, "local_attention": 16},
            _layers("SFS"),
        ),
        # Mixtures of experts.
        family("mixtral", "", _WIDE, _LOCAL_MOE, {"sliding_window": WINDOW}),
        family("phimoe", "", _WIDE, _LOCAL_MOE),
        family("granitemoe", "", _SQUARE, _LOCAL_MOE, _GRANITE, head=6.0),
        family("granitemoeshared", "", _SQUARE, _LOCAL_MOE, _GRANITE, {"shared_intermediate_size": 32}, head=6.0),
        family("qwen2_moe", "", _SQUARE, _MOE, {"shared_expert_intermediate_size": 32}),
        family("qwen3_moe", "", _WIDE, _MOE),
        family("olmoe", "", _SQUARE, _GLOBAL_MOE),
        family("flex_olmo", "", _SQUARE, _GLOBAL_MOE),
        family("ernie4_5_moe", "", _WIDE, {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
        family("glm4_moe", "", _WIDE, _ROUTED_MOE),
        family("minimax_m2", "", _WIDE, _LOCAL_MOE),
        family("jetmoe", "", _MLP, _LOCAL_MOE, {"kv_channels": 16, "num_key_value_heads": 2}),
        family("afmoe", "", _WIDE, _MOE, _window("SSSF")),
        family("dots1", "", _WIDE, _ROUTED_MOE, _window("FSS")),
        family("exaone_moe", "", _WIDE, _MOE, _window("SSSF")),
        family("cohere2_moe", "", _WIDE, _GLOBAL_MOE, _window("SSSF"), {"logit_scale": 0.5}, head=6.0),
        family("laguna", "", _WIDE, _MOE, _window("FSS"), {"num_attention_heads_per_layer": [4, 6, 2]}),
        family("kolibri1", "", _HEADS, _MOE, _window("SSF")),
        # Keys and values of different widths.
        family("deepseek_v2", "", _MLA, _ROUTED_MOE, {"topk_method": "greedy", "n_group": 1}),
        family("deepseek_v3", "", _MLA, _ROUTED_MOE, {"rope_parameters": _YARN}),
        family("glm4_moe_lite", "", _MLA, _FEW_MOE, {"v_head_dim": 32}),
        family("youtu", "", _MLA),
        family(
            "longcat_flash",
            "",
            _MLA,
            {
                "head_dim": 8,
                **_LONGCAT_LAYERS,
                "ffn_hidden_size": 64,
                "moe_topk": 2,
                "n_routed_experts": 4,
                "expert_ffn_hidden_size": 32,
                "zero_expert_num": 2,
            },
        ),
        # Sinks.
        family("gpt_oss", "", _WIDE, _LOCAL_MOE, _window("SFS", 7)),
        family("granite_swa", "", _SQUARE, _GRANITE, _window("SFS"), head=6.0),
        family("granitemoe_swa", "", _SQUARE, _LOCAL_MOE, _GRANITE, _window("SFS"), head=6.0),
        family("mimo_v2_flash", "", _WIDE, _FEW_MOE, {"v_head_dim": 12}, _window("FSS"), _two_ropes()),
        family("flint", "", _WIDE, _MOE, _window("SFS")),
        # Layer norms, parallel blocks, learned positions, a part of the head rotated, one KV head.
        family("phi", "", _SQUARE, **_BIASED),
        family("stablelm", "", _SQUARE, {"use_qkv_bias": True, "qk_layernorm": True}, **_BIASED),
        family("nemotron", "", _WIDE, scale={"norm": 0.2}),  # its norms add one to a weight of one
        family("gpt_neox", "", _MLP, **_BIASED),
        family("persimmon", "", _MLP, {"hidden_size": 64}, **_BIASED),
        family("gpt2", "", {"tie_word_embeddings": True}, **_BIASED),
        family("gpt_bigcode", "", {"multi_query": True}, **_BIASED),
        family("biogpt", "", _MLP, **_BIASED),
        family("opt", "", {"ffn_dim": 64, "word_embed_proj_dim": 48}, **_BIASED),
        family("ctrl", "", {"dff": 64}, **_BIASED),
        # Layers that carry a state from token to token: gated delta rules, state spaces, short convolutions.
        family("qwen3_next", "", _WIDE, _SHARED_MOE, _GATED_DELTA, _layers("LLLF")),
        family("qwen3_5", "qwen3_5_text", _WIDE, _GATED_DELTA, _layers("LFL")),
        family("qwen3_5_moe", "qwen3_5_moe_text", _WIDE, _SHARED_MOE, _GATED_DELTA, _layers("LLF")),
        family("olmo_hybrid", "", _SQUARE, _GATED_DELTA, {"linear_num_key_heads": 4}, _layers("LLF")),
        family("kimi_linear", "", _MLA, _MOE, {"linear_num_heads": 4, "linear_head_dim": 8}, _layers("LLF")),
        family("bailing_hybrid", "", _MLA, _MOE, {"head_dim": 16, "n_group": 1, "topk_group": 1}, _layers("LLF")),
        family("mamba2", "", {"num_heads": 4, "head_dim": 24, "state_size": 8, **_OWN_MAMBA2}),
        family("mamba", "", {"state_size": 8}),
        family("falcon_mamba", "", {"state_size": 8}),
        family("jamba", "", _GQA, _JAMBA),
        family("zamba", "", _MLP, {"num_key_value_heads": 4}, _ZAMBA),
        family("bamba", "", _GQA, _MAMBA2, {"attn_layer_indices": [1], "pad_token_id": 0}),
        family("falcon_h1", "", _WIDE, _MAMBA2, {"mamba_d_ssm": 96}),
        family("granitemoehybrid", "", _GQA, _LOCAL_MOE, _MAMBA2, {"shared_intermediate_size": 32}, _layers("LFL")),
        family("nemotron_h", "", _GQA, _NEMOTRON_H),
        family("lfm2", "", _GQA, {"layer_types": ["conv", "full_attention", "conv"]}),
        family("lfm2_moe", "", _GQA, _MOE, {"layer_types": ["conv", "full_attention", "conv"]}),
    ]
)

CARRYING = [*FAMILIES][[*FAMILIES].index("qwen3_next") :]  # those whose layers carry a state
ATTENDING = [*FAMILIES][: -len(CARRYING)]  # every layer attends, and nothing else reaches from token to token

_BART = {"d_model": 32, "max_position_embeddings": 128, "is_decoder": True, "is_encoder_decoder": False}
_BART |= {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 3), ("attention_heads", 4), ("ffn_dim", 32))
}
_BART |= {"pad_token_id": 0, "decoder_start_token_id": 0, "forced_eos_token_id": None}
_N = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}

# What must be refused by name, each with the reason why:
#   unrouted   never calls the registered function
#   mask       keeps a part of its meaning in the mask alone
#   two-way    looks ahead
#   recurrent  has a state besides keys and values that is not known to be carried as those of ``CARRYING`` are
#   repeated   runs one attention module several times in one forward
#   encoder    is an encoder-decoder
#   positions  counts positions by itself, along its row
#   forgets    has a window in its config that generate's cache keeps to, and attention does not
REFUSED: dict[str, Family] = dict(
    [
        family("falcon", "", {"hidden_size": 64, "num_kv_heads": 2, "new_decoder_architecture": True}, why="unrouted"),
        family("gptj", "", _N, {"rotary_dim": 8}, why="unrouted"),
        family(
            "gpt_neo",
            "",
            {
                "hidden_size": 64,
                "num_layers": 2,
                "num_hidden_layers": 2,
                "window_size": WINDOW,
                "attention_types": [[["global", "local"], 1]],
            },
            why="unrouted",
        ),
        family("codegen", "", _N, {"rotary_dim": 8}, why="unrouted"),
        family("bloom", "", {"hidden_size": 64, "n_layer": 2, "n_head": 4}, why="unrouted"),
        family("mpt", "", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}, why="unrouted"),
        family("xglm", "", {"d_model": 64, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}, why="unrouted"),
        family("openai_gpt", "openai-gpt", _N, why="unrouted"),
        family("gpt_neox_japanese", "", {"hidden_size": 64}, why="unrouted"),
        family(
            "llama4",
            "llama4_text",
            _WIDE,
            {
                "attention_chunk_size": WINDOW,
                "intermediate_size_mlp": 64,
                "num_local_experts": 4,
                "interleave_moe_layer_step": 2,
                "num_hidden_layers": 4,
            },
            why="mask",
        ),
        family("doge", "", _SQUARE, {"keep_window_size": WINDOW}, why="mask"),
        family("phimoe_window", "phimoe", _WIDE, _LOCAL_MOE, {"sliding_window": WINDOW}, why="mask"),
        family(
            "qwen2_moe_window",
            "qwen2_moe",
            _SQUARE,
            _MOE,
            {"shared_expert_intermediate_size": 32, "use_sliding_window": True},
            _window("SFS"),
            why="mask",
        ),
        family(
            "gemma3_two_way", "gemma3_text", _WIDE, {"use_bidirectional_attention": True}, _window("SSF"), why="two-way"
        ),
        family("bert", "", _MLP, {"hidden_size": 64, "pad_token_id": 0}, why="two-way"),
        family("recurrent_gemma", "", _WIDE, {"lru_width": 48, "attention_window_size": WINDOW}, why="recurrent"),
        family("minimax", "", _WIDE, _LOCAL_MOE, _layers("LFL"), why="recurrent"),
        family("diffllama", "", _SQUARE, why="repeated"),
        family("hrm_text", "", _MLP, {"head_dim": 16, "prefix_lm": False}, why="repeated"),
        *[
            family(name.replace("-", "_"), name, _BART, why="positions")
            for name in ("bart", "mbart", "blenderbot", "blenderbot-small", "marian", "pegasus", "plbart")
        ],
        family(
            "llama4_full",
            "llama4_text",
            _WIDE,
            {"intermediate_size_mlp": 64, "num_local_experts": 4, "moe_layers": []},
            _layers("FFF"),
            {"no_rope_layers": [1, 0, 1], "floor_scale": 4, "attn_scale": 1.0},
            why="positions",
        ),
        family("moshi", "", {"sliding_window": WINDOW, "ffn_dim": 64, "hidden_size": 64}, why="forgets"),
        family("llama_window", "llama", _WIDE, {"sliding_window": WINDOW}, why="forgets"),
        family("gpt_neox_chunks", "gpt_neox", _MLP, {"attention_chunk_size": WINDOW}, why="forgets"),
        family("olmo2_layers", "olmo2", _SQUARE, _window("SFS"), why="forgets"),
        family(
            "t5",
            "",
            {
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 64,
                "num_layers": 2,
                "num_hidden_layers": 2,
                "decoder_start_token_id": 0,
                "pad_token_id": 0,
            },
            why="encoder",
            auto=AutoModelForSeq2SeqLM,
        ),
    ]
)


@cache
def build(name: str) -> PreTrainedModel:
    """The family's model, the same object at every call in this process: leave it as you found it."""
    return FAMILIES[name]()


def family_params(names: Iterable[str] | None = None, table: dict[str, Family] = FAMILIES) -> list[Any]:
    """``pytest.mark.parametrize`` values: what this transformers lacks is skipped, with the reason."""
    lacking = {name: table[name].missing() for name in (table if names is None else names)}
    return [pytest.param(name, marks=[pytest.mark.skip(why)] if why else []) for name, why in lacking.items()]


PROMPT_KINDS = ("distinct", "prefix", "nested", "equal", "prefix_of_another", "one_token", "window", "mixed")


def random_prompts(
    rng: random.Random, vocab: int, kind: str = "mixed", count: int = 6, window: int = WINDOW
) -> list[list[int]]:
    """``count`` prompts of at most 70 tokens that share what ``kind`` says; "mixed": two or more of each, shuffled."""

    def draw(length: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(length)]

    each = range(count)
    if kind == "distinct":
        return [draw(5 + 7 * index % 60) for index in each]
    if kind == "prefix":
        prefix = draw(3 * window)
        return [prefix + draw(1 + 3 * index % 40) for index in each]
    if kind == "nested":  # one root, two middles, two leaves below each, and the prompts below those
        root = draw(2 * window + 1)
        middles = [root + draw(window + index) for index in range(2)]
        leaves = [middle + draw(5) for middle in middles for _ in range(2)]
        return [leaves[index % 4] + draw(1 + index % 20) for index in each]
    if kind == "equal":
        return [draw(2 * window + 3)] * count
    if kind == "prefix_of_another":
        longest = draw(min(2 * count + 2 * window, 70))
        return [longest[: max(1, len(longest) - 2 * index)] for index in each]
    if kind == "one_token":
        return [draw(1) for _ in each]
    if kind == "window":  # what is added to a shared start that ends one token before the window does
        start, added = draw(window - 1), (0, 1, 2, window, window + 1, 3 * window, 5 * window, 6 * window)
        return [start + draw(added[index % len(added)]) for index in each]
    assert kind == "mixed", f"{kind!r} is not one of {PROMPT_KINDS}"
    some = max(2, count // 7)
    prompts = [prompt for other in PROMPT_KINDS[:-1] for prompt in random_prompts(rng, vocab, other, some, window)]
    rng.shuffle(prompts)
    return prompts
