"""Every causal and image-text class of the installed transformers, each as a tiny random model.

A class comes in several patterns: as its config has it by default, with another pattern of layers, and with fields that
its config does not have, such as those a checkpoint's config.json may carry.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from support_family_models import Family, randomise
from support_sweep_shrink import FEWEST_LAYERS, KV_HEADS, VOCABULARY, WINDOW, OfText, shrunk
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.models.timm_wrapper.modeling_timm_wrapper import TimmWrapperModel

_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_TWO_ROPES = {kind: {**_SECTIONS, "mrope_section": [3, 3, 2]} for kind in ("full_attention", "sliding_attention")}
_SWA = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 24, "swa_kv_lora_rank": 20}
_SWA |= {"swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 12}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
_NO_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}

_MUSICGEN = {
    "text_encoder": {"model_type": "t5"},
    "audio_encoder": {"model_type": "encodec"},
    "decoder": {"model_type": "musicgen_decoder"},
}

# Without these a class cannot even be made with its own defaults, in one version of transformers or another.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "vision-encoder-decoder": {"encoder": {"model_type": "vit"}, "decoder": {"model_type": "gpt2"}},
    **dict.fromkeys(("musicgen", "musicgen_melody"), _MUSICGEN),
    "diffusion_gemma": {"vision_config": {"model_type": "gemma4_vision"}},
    "granite4_vision": {"text_config": {"model_type": "granite"}},
    "gemma4_assistant": {"text_config": {**_NO_LAYER_INPUTS, "num_kv_shared_layers": 30, "num_hidden_layers": 30}},
}
# What neither a field's name nor its default says, by the class of the config.
OVERRIDES: dict[str, dict[str, Any]] = {
    # The default is None, and the model does not build with it.
    "ChameleonConfig": {"vocabulary_map": {"<image>": 127, "IMGIMGBS0Z": 126}},
    "Emu3Config": {"vocabulary_map": {"<image>": 127, "<|extra_200|>": 126, "<|visual token 000000|>": 125}},
    "Apertus1p5Config": {"image_token_offset": 100, "audio_token_offset": 104},
    "BambaConfig": {"attn_layer_indices": [1, 3]},
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8.0},
    "Dots1Config": _EXPERTS,
    "Granite4VisionConfig": {"deepstack_layer_map": [[1, 1], [2, 2]], "downsample_rate": "4/8"},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    # By default all layers are full; checkpoints have sparse ones.
    "MiniMaxM3VLTextConfig": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": KV_HEADS},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "TimmWrapperConfig": {"model_args": {"embed_dim": 64}},
    # The default describes one kind of layer, and the model asks for two.
    "CohereCompassTextConfig": {"rope_parameters": _TWO_ROPES, "head_dim": 16},
    # Not fields of the class, though it reads them.
    "Dots3NoteTextConfig": _SWA,
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 101},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 101},
    # Sizes that have to agree with each other.
    "Apertus1p5VisionTokenizerConfig": {"codebook_size": 4},
    "WavTokenizerEncoderConfig": {"codebook_size": 4, "codebook_dim": 64},
    "DoryConfig": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "HYV4VLTextConfig": {"rope_parameters": {**_SECTIONS, "mrope_section": [2, 1, 1]}},
    "Dots3NoteAudioConfig": {"adapter_input_size": 64},
    "XLNetConfig": {"d_head": 16},
    "BltPatcherConfig": {"head_dim": 16},
    "BltLocalDecoderConfig": {"head_dim": 16},
    "BltGlobalTransformerConfig": {"head_dim": 16},
    "Mistral4Config": {"qk_nope_head_dim": 8, "qk_head_dim": 16, "head_dim": 16},  # RoPE is told that half is rotated
    "xLSTMConfig": {"qk_dim_factor": 1.0},  # the two it has by default do not agree in its first pass
    "BlenderbotConfig": {"encoder_layers": 4},  # its cache has as many layers as the encoder
    "Ernie4_5_VLMoeTextConfig": {"rope_parameters": {**_SECTIONS, "mrope_section": [3, 3, 2]}},
    "Glm4vTextConfig": {"rope_parameters": _SECTIONS},
    "Glm4vMoeTextConfig": {"rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    "GlmOcrTextConfig": {"rope_parameters": _SECTIONS},
    "PaddleOCRTextConfig": {"rope_parameters": {**_SECTIONS, "mrope_section": [4, 6, 6]}},
    "Qwen2VLTextConfig": {"rope_parameters": _SECTIONS},
    "Qwen2_5_VLTextConfig": {"rope_parameters": _SECTIONS},
    "Qwen2_5OmniTextConfig": {"rope_parameters": _SECTIONS},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "HeliumConfig": {"head_dim": 16},
    "HunYuanVLConfig": {"rope_parameters": {**_SECTIONS, "mrope_section": [4, 4, 4, 4]}},
    "HunYuanVLTextConfig": {"rope_parameters": {**_SECTIONS, "mrope_section": [4, 4, 4, 4]}},
    "HrmTextConfig": {"num_hidden_layers": 2, "num_layers_per_stack": None, "head_dim": 16, "prefix_lm": False},
    "Step3p7TextConfig": {"sliding_window": WINDOW},  # its cache asks for one
    "XmodConfig": {"default_language": "en_XX"},
    "Zamba2Config": {"attention_hidden_size": 128},
    # Layers that share weights with each other: there must be two.
    "ZambaConfig": {
        "attention_hidden_size": 128,
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "Glm5NextTextConfig": {"index_topk": 16},
    "Molmo2AdapterConfig": {"vision_feature_layer": [3, 2]},
    # The model builds as a decoder only.
    "ReformerConfig": {"is_decoder": True, "axial_pos_embds_dim": (16, 48), "axial_pos_shape": (16, 32)},
}  # fmt: skip

PATTERNS = ("default", "other")
# Fields that a config.json may carry though the class does not know them: `generate` drops what its cache takes for out
# of a window, whatever the layers do.
STRAYS: dict[str, dict[str, Any]] = {
    "stray sliding_window": {"sliding_window": WINDOW},
    "stray attention_chunk_size": {"attention_chunk_size": WINDOW},
    "stray layer_types": {"sliding_window": WINDOW, "layer_types": None},
}


class NothingToChange(Exception):
    """The class has no such pattern."""


@dataclass(frozen=True, order=True)
class Case:
    """A class, and one of the types of config that lead to it."""

    class_name: str
    model_type: str

    def __str__(self) -> str:
        return f"{self.class_name} ({self.model_type})"


def cases() -> list[Case]:
    """Those of both mappings, each once."""
    found = {}
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for model_type, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                found[Case(name, model_type)] = None
    return sorted(found, key=lambda case: (case.class_name.lower(), case.model_type))


def tiny_config(model_type: str, pattern: str = "default") -> PreTrainedConfig:
    default = CONFIG_MAPPING[model_type](**copy.deepcopy(ARGUMENTS.get(model_type, {})))
    return shrunk(default, _changes(pattern), OVERRIDES)


def _config_for(case: Case, pattern: str) -> PreTrainedConfig:
    config = tiny_config(case.model_type, pattern)
    wanted = getattr(transformers, case.class_name).config_class
    inside = config.get_text_config(decoder=True)  # for a class that is a part of the model that the config describes
    return inside if type(config) is not wanted is type(inside) else config


def tiny_model(case: Case, pattern: str = "default") -> PreTrainedModel:
    """In float32, with random weights under which attention matters and the best logit is clearly the best."""
    config = _config_for(case, pattern)
    _stand_in_for_towers()
    soft_cap = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    if soft_cap:  # SDPA would drop it
        config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model: PreTrainedModel = getattr(transformers, case.class_name)(config).to(torch.float32).eval()
    randomise(model, Family(case.class_name, case.model_type, {}))
    model.generation_config = GenerationConfig(pad_token_id=0)  # no special tokens: it goes on to the full length
    return model


def _changes(pattern: str) -> OfText:
    if pattern == "default":
        return lambda fields, _: fields
    return _other_layers if pattern == "other" else functools.partial(_with_strays, STRAYS[pattern])


def _other_layers(fields: dict[str, Any], default: PreTrainedConfig) -> dict[str, Any]:
    """Full attention alone where there are windows, windows where there are none; else one KV head, or no tie."""
    now = {**vars(default), **fields}
    windows = [name for name in ("sliding_window", "attention_chunk_size", "attention_window_size") if name in now]
    kinds = now.get("layer_types")
    on = any(now[name] for name in windows) and now.get("use_sliding_window") is not False
    new: dict[str, Any] = {}
    if kinds and {"sliding_attention", "chunked_attention"} & set(kinds):
        full = {"sliding_attention": "full_attention", "chunked_attention": "full_attention"}
        new["layer_types"] = [full.get(kind, kind) for kind in kinds]
    elif on and not kinds:
        new |= dict.fromkeys(windows, 512)  # not None, which some do not take
    elif windows:
        new |= dict.fromkeys(windows, WINDOW)
        if kinds:
            new["layer_types"] = _every_other(kinds, "sliding_attention")
    if "use_sliding_window" in now:
        new["use_sliding_window"] = not now["use_sliding_window"]
    if now.get("is_decoder") is False:
        new["is_decoder"] = True
    if now.get("num_kv_shared_layers") == 0:
        new["num_kv_shared_layers"] = FEWEST_LAYERS // 2
    if not new and now.get("num_key_value_heads") == KV_HEADS:
        new["num_key_value_heads"] = 1
    if not new and now.get("tie_word_embeddings"):
        new["tie_word_embeddings"] = False
    return fields | new


def _every_other(kinds: list[str], kind: str) -> list[str]:
    return [kind if number % 2 and now == "full_attention" else now for number, now in enumerate(kinds)]


def _with_strays(strays: dict[str, Any], fields: dict[str, Any], default: PreTrainedConfig) -> dict[str, Any]:
    known = vars(default)
    if list(strays)[-1] in known:
        raise NothingToChange
    name = default.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    kinds = ["full_attention" if number % 2 else "sliding_attention" for number in range(fields.get(name, 0))]
    return fields | {name: value or kinds for name, value in strays.items()}


def _init_tower(self: PreTrainedModel, config: PreTrainedConfig) -> None:
    PreTrainedModel.__init__(self, config)
    self.timm_model = torch.nn.Linear(2, 2)
    self.post_init()


@functools.cache
def _stand_in_for_towers() -> None:
    """Some vision towers come from a package of their own, which need not be there: text prompts never run one."""
    TimmWrapperModel.__init__ = _init_tower


assert VOCABULARY > 100  # prompts hold ids from 3 to 96, special tokens are the last
