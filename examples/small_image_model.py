"""A model that reads images, without a model hub. It is made up: it reads them, and sees nothing in them.

    from small_image_model import load
    model, processor = load()

No model that sees comes as a Python package. So Gemma 3 270M (small_model.py) is put behind a vision tower of LLaVA's
kind with random weights, whose features are kept faint: the text of an answer is Gemma's. All that the library does
with images is done as for a real model, which is loaded as ``AutoModelForImageTextToText`` with its ``AutoProcessor``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import small_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

_SIDE, _PATCH = 224, 28  # pixels of a picture as the tower sees it, and of the part that becomes a token: 64 tokens
_PLACEHOLDER = "<unused0>"
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<unused0>\n' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
)


def load(language: tuple[Any, Any] | None = None) -> tuple[PreTrainedModel, ProcessorMixin]:
    """The model in float32 on the CPU, and its processor.

    ``language``: the language model and its tokenizer, if they are loaded already. The model is put around it.
    """
    import torch
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        CLIPVisionModel,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    gemma, tokenizer = language or small_model.load()
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=_SIDE,
        patch_size=_PATCH,
    )  # fmt: skip
    placeholder = tokenizer.convert_tokens_to_ids(_PLACEHOLDER)
    config = LlavaConfig(text_config=gemma.config, vision_config=vision, image_token_id=placeholder)
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    inner = model.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inner.vision_tower = CLIPVisionModel(vision)
        inner.multi_modal_projector = type(inner.multi_modal_projector)(config)
    inner.language_model, model.lm_head = gemma.model, gemma.lm_head
    model.generation_config = gemma.generation_config
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE}
        ),
        tokenizer=tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=_PLACEHOLDER,
        chat_template=_TEMPLATE,
    )
    return model.eval(), processor
