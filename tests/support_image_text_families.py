"""Tiny random models of classes that read images and text, for prompts of text alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from support_families import WINDOW
from support_family_models import Family, randomise
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

_TEXT: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# Three positions a token (time, height, width); for text, all three are the same.
_THREE_POSITIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 32, "patch_size": 16}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 32}
_OCR_VISION = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_OCR_VISION |= {"image_size": 64, "mlp_dim": 32}
_GRID = {"image_grid_pinpoints": [[32, 32]]}


@dataclass(frozen=True)
class ImageTextFamily:
    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    more: dict[str, Any]

    def __call__(self) -> PreTrainedModel:
        text = _TEXT | self.text
        config = AutoConfig.for_model(self.name, text_config=text, vision_config=self.vision, **self.more)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            auto: Any = AutoModelForImageTextToText
            model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        randomise(model, Family(self.name, self.name, {}))
        return model


def _family(name: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> tuple[str, ImageTextFamily]:
    return name, ImageTextFamily(name, text, vision, more)


_PHI4 = {**_TEXT, "sliding_window": None, "original_max_position_embeddings": 512}
_PHI4 |= {"vision_config": _VISION | {"num_hidden_layers": 2, "crop_size": 32, "image_token_id": 99}}
_PHI4 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_PHI4["audio_config"] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "ext_pw_out_channel"), 32),
    **dict.fromkeys(("depthwise_separable_out_channel", "nemo_conv_channels"), 32),
    "num_blocks": 1,
    "num_attention_heads": 2,
    "audio_token_id": 98,
}

IMAGE_TEXT: dict[str, ImageTextFamily | Family] = dict(
    [
        _family("gemma3", _WINDOWED, _VISION, mm_tokens_per_image=4),
        _family("mistral3", {"model_type": "mistral"}, _VISION | {"model_type": "pixtral", "head_dim": 16}),
        _family("qwen2_vl", _THREE_POSITIONS, {"depth": 1, "embed_dim": 32, "hidden_size": 48, "num_heads": 2}),
        _family("qwen2_5_vl", _THREE_POSITIONS, _QWEN_VISION),
        _family("qwen3_vl", _THREE_POSITIONS, _QWEN_VISION | {"deepstack_visual_indexes": [0]}),
        _family("qwen3_vl_moe", _THREE_POSITIONS | _EXPERTS, _QWEN_VISION | {"deepstack_visual_indexes": [0]}),
        _family("glm4v", _THREE_POSITIONS, _QWEN_VISION),
        _family("internvl", {"model_type": "qwen2"}, _VISION | {"image_size": [32, 32], "patch_size": [16, 16]}),
        _family("llava", {"model_type": "llama"}, _VISION | {"model_type": "clip_vision_model"}),
        # These hand `logits_to_keep` on to their attention.
        _family("llava_onevision", {"model_type": "qwen2"}, _VISION | {"model_type": "siglip_vision_model"}, **_GRID),
        _family("got_ocr2", {"model_type": "qwen2"}, _OCR_VISION),
        _family("pp_chart2table", {"model_type": "qwen2"}, _OCR_VISION),
        _family("idefics3", {"model_type": "llama"}, _VISION),
        _family("aya_vision", {"model_type": "cohere2", **_WINDOWED}, _VISION | {"model_type": "siglip_vision_model"}),
        ("phi4_multimodal", Family("phi4_multimodal", "phi4_multimodal", _PHI4)),
    ]
)
# One for each class of layers in the table of fused families that no model of text alone has.
FUSED_IMAGE_TEXT = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "phi4_multimodal"]
