"""Tiny models that read images, with processors made here; pictures of noise; and what ``generate`` says of them."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from support_families import _GATED_DELTA, _GEMMA4
from support_family_models import Family, randomise
from support_image_text_families import _EXPERTS, _QWEN_VISION, _TEXT, _THREE_POSITIONS, _VISION
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast, ProcessorMixin

_WORDS = 100
_QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
_IDEFICS = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
_IDEFICS += [f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)]
_QWEN_PIXELS = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 32 * 32, "longest_edge": 96 * 96}}
_QWEN_TOWER = _QWEN_VISION | {"patch_size": 16, "spatial_merge_size": 2, "in_channels": 3}


@dataclass(frozen=True)
class Pictured:
    """A family: its config, its processor, and how a template writes an image."""

    model: str
    text: dict[str, Any]
    vision: dict[str, Any]
    processor: str
    pixels: str
    shown: str
    tokens: list[str]
    of_pixels: dict[str, Any] = field(default_factory=dict)
    of_processor: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    folder: str = ""  # of the processor's class, if it is not the model's
    drawn: dict[str, Any] = field(default_factory=dict)  # how its weights are, as ``Family`` has it


def _qwen(
    name: str, processor: str, vision: dict[str, Any], text: dict[str, Any] | None = None, folder: str = ""
) -> Pictured:
    around = "<|vision_start|><|image_pad|><|vision_end|>"
    return Pictured(
        name,
        _THREE_POSITIONS | (text or {}),
        vision,
        processor,
        "Qwen2VLImageProcessorPil",
        around,
        _QWEN,
        _QWEN_PIXELS,
        more={"vision_start_token_id": _WORDS + 2, "vision_end_token_id": _WORDS + 3, "video_token_id": _WORDS + 1},
        folder=folder,
    )


_LLAVA_PIXELS = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
_PINPOINTS = {"image_grid_pinpoints": [[32, 64], [64, 32]]}
_GEMMA = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 4}
_HYBRID = _GATED_DELTA | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_DEEP = _QWEN_TOWER | {"depth": 2, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 36}
PICTURED = {
    "llava": Pictured(
        "llava",
        {"model_type": "llama"},
        _VISION | {"model_type": "clip_vision_model", "num_hidden_layers": 2},
        "LlavaProcessor",
        "CLIPImageProcessorPil",
        "<image>",
        ["<image>"],
        _LLAVA_PIXELS,
        {"patch_size": 16, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "qwen2_vl": _qwen(
        "qwen2_vl",
        "Qwen2VLProcessor",
        {"depth": 1, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "patch_size": 16, "spatial_merge_size": 2},
    ),
    "qwen2_5_vl": _qwen("qwen2_5_vl", "Qwen2_5_VLProcessor", _QWEN_TOWER | {"window_size": 64}),
    "qwen3_vl": _qwen("qwen3_vl", "Qwen3VLProcessor", _DEEP),
    "qwen3_5": _qwen(
        "qwen3_5", "Qwen3VLProcessor", _QWEN_TOWER | {"depth": 2, "num_position_embeddings": 36}, _HYBRID, "qwen3_vl"
    ),
    "qwen3_5_moe": _qwen(
        "qwen3_5_moe",
        "Qwen3VLProcessor",
        _QWEN_TOWER | {"depth": 2, "num_position_embeddings": 36},
        _HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 32},
        "qwen3_vl",
    ),
    "qwen3_vl_moe": _qwen("qwen3_vl_moe", "Qwen3VLProcessor", _DEEP, _EXPERTS, folder="qwen3_vl"),
    "glm4v": Pictured(
        "glm4v",
        _THREE_POSITIONS,
        _QWEN_TOWER | {"image_size": 64},
        "Glm4vProcessor",
        "Glm4vImageProcessorPil",
        "<|begin_of_image|><|image|><|end_of_image|>",
        ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"],
        {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 32 * 32, "longest_edge": 2 * 96 * 96}},
        more={"image_start_token_id": _WORDS + 2, "image_end_token_id": _WORDS + 3, "video_token_id": _WORDS + 1},
    ),
    "internvl": Pictured(
        "internvl",
        {"model_type": "qwen2"},
        _VISION | {"image_size": [32, 32], "patch_size": [16, 16]},
        "InternVLProcessor",
        "GotOcr2ImageProcessorPil",
        "<IMG_CONTEXT>",
        ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
        {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        {"image_seq_length": 1},
    ),
    "idefics3": Pictured(
        "idefics3",
        {"model_type": "llama"},
        _VISION,
        "Idefics3Processor",
        "Idefics3ImageProcessorPil",
        "<image>",
        _IDEFICS,
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        {"image_seq_len": 1},
    ),
    "smolvlm": Pictured(
        "smolvlm",
        {"model_type": "llama"},
        _VISION,
        "SmolVLMProcessor",
        "SmolVLMImageProcessorPil",
        "<image>",
        [*_IDEFICS, "<video>"],
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        {"image_seq_len": 1, "video_processor": types.SimpleNamespace(num_frames=1, fps=1)},
    ),
    "llava_next": Pictured(
        "llava_next",
        {"model_type": "llama"},
        _VISION | {"model_type": "clip_vision_model", "num_hidden_layers": 2},
        "LlavaNextProcessor",
        "LlavaNextImageProcessorPil",
        "<image>",
        ["<image>"],
        _LLAVA_PIXELS | _PINPOINTS,
        {"patch_size": 16, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
        _PINPOINTS,
    ),
    # Its images are longer than its windows.
    "gemma3": Pictured(
        "gemma3",
        _GEMMA,
        _VISION | {"patch_size": 8},
        "Gemma3Processor",
        "Gemma3ImageProcessorPil",
        "<start_of_image>",
        ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        {"size": {"height": 32, "width": 32}},
        {"image_seq_length": 16},
        {"mm_tokens_per_image": 16, "boi_token_index": _WORDS + 1, "eoi_token_index": _WORDS + 2},
        drawn={"embed": 0.1},
    ),
    "gemma4": Pictured(
        "gemma4",
        _GEMMA | _GEMMA4 | {"vocab_size_per_layer_input": 120, "use_bidirectional_attention": "vision"},
        _VISION | {"patch_size": 4, "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 64},
        "Gemma4Processor",
        "Gemma4ImageProcessorPil",
        "<image_soft_token>",
        ["<image_soft_token>", "<|video|>", "<start_of_image>", "<end_of_image>", "<start_of_audio>", "<end_of_audio>"],
        {"patch_size": 4, "max_soft_tokens": 70},
        {"image_seq_length": 70, "feature_extractor": None, "video_processor": None},
        {"video_token_id": _WORDS + 1, "audio_token_id": _WORDS + 9, "audio_config": None},
        drawn={"embed": 0.1, "scale": {"q_norm": 0.5, "k_norm": 0.5}},
    ),
    "mistral3": Pictured(
        "mistral3",
        {"model_type": "mistral"},
        _VISION | {"model_type": "pixtral", "head_dim": 16, "image_size": 96},
        "PixtralProcessor",
        "PixtralImageProcessorPil",
        "[IMG]",
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        {"size": {"longest_edge": 96}, "patch_size": {"height": 32, "width": 32}},
        {"patch_size": 16, "spatial_merge_size": 2},
        {"spatial_merge_size": 2},
        folder="pixtral",
    ),
}
_SPECIAL = {"<img>": "start_image_token", "</img>": "end_image_token", "<IMG_CONTEXT>": "context_image_token"}
_SPECIAL |= {"<start_of_image>": "boi_token", "<end_of_image>": "eoi_token", "<image_soft_token>": "image_token"}
_SPECIAL |= {"<start_of_audio>": "boa_token", "<end_of_audio>": "eoa_token"}


@cache
def model_of(family: str, device: str = "cpu") -> Any:
    """The same object at every call: leave it as you found it."""
    known = copy.deepcopy(PICTURED[family])  # some configs write into what they are given
    vocabulary = {"vocab_size": _WORDS + len(known.tokens) + 4}
    config = AutoConfig.for_model(
        known.model,
        text_config=_TEXT | vocabulary | known.text,
        vision_config=known.vision,
        image_token_id=_WORDS,
        **known.more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        auto: Any = AutoModelForImageTextToText
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomise(model, Family(family, family, {}, **known.drawn))
    return model.to(device)


def _class_of(folder: str, name: str) -> type[ProcessorMixin]:
    with pytest.MonkeyPatch.context() as patch:
        if (
            importlib.util.find_spec("torchvision") is None
        ):  # Pixtral's module imports it, and needs it only for tensors
            for part in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
                patch.setitem(sys.modules, part, types.ModuleType(part))
            named = types.SimpleNamespace(InterpolationMode=None)  # for an annotation
            sys.modules["torchvision.transforms.v2"].functional = named  # type: ignore[attr-defined]
        module = importlib.import_module(f"transformers.models.{folder}.processing_{folder}")
    return getattr(module, name)


@cache
def processor_of(family: str) -> Any:
    known = PICTURED[family]
    tokens = {f"w{number}": number for number in range(_WORDS)}
    tokens |= {token: _WORDS + place for place, token in enumerate(known.tokens)}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known.tokens])
    named = {name: token for token, name in _SPECIAL.items() if token in known.tokens}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=named, pad_token="w0")
    if family == "internvl":
        fast.video_token = "<video>"
    try:
        pixels = getattr(transformers, known.pixels)(**known.of_pixels)
        cls = _class_of(known.folder or known.model, known.processor)
    except (ImportError, AttributeError) as error:  # of older versions some need torchvision
        if isinstance(error, AttributeError) and "InterpolationMode" not in str(error):
            raise
        pytest.skip(str(error).strip().splitlines()[0])
    template = (
        "{% for message in messages %}{{ ' w1 ' if message['role'] == 'user' else ' w2 ' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + known.shown + "{% else %}"
        "{{ ' ' + part['text'] + ' ' }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' w2 ' }}{% endif %}"
    )
    with pytest.MonkeyPatch.context() as patch:
        # Without torchvision there are no processors of videos, nor the classes that arguments are compared with.
        patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
        if hasattr(sys.modules[cls.__module__], "num2words"):  # for videos, and wanted by all
            patch.setattr(sys.modules[cls.__module__], "num2words", True)
        return cls(image_processor=pixels, tokenizer=fast, chat_template=template, **known.of_processor)


def picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def words(*numbers: int) -> dict[str, str]:
    return {"type": "text", "text": " ".join(f"w{number}" for number in numbers)}


def shows(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


def inputs_of(family: str, chat: Any) -> dict[str, torch.Tensor]:
    """What the processor makes of a chat."""
    made = processor_of(family).apply_chat_template(
        [chat], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    return {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}


def generated(family: str, chats: Sequence[Any], new: int, device: str = "cpu", **options: Any) -> list[list[int]]:
    """By ``generate``, one chat at a time."""
    model = model_of(family, device)
    found = []
    for chat in chats:
        inputs = inputs_of(family, chat)
        rows = model.generate(
            **{name: value.to(device) for name, value in inputs.items()},
            **{"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options,
        )
        found += rows[:, inputs["input_ids"].shape[1] :].tolist()
    return found
