"""Which models images are served for, and what such a model asks for."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..base_model import base_model

# They take what `get_image_features` gives in the place of placeholders. Each is tested against `generate`.
_SERVED = (
    "gemma3",
    "gemma4",
    "glm4v",
    "idefics3",
    "internvl",
    "llava",
    "llava_next",
    "mistral3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
)  # fmt: skip
# In these a token of an image sees all of the image, also what is behind it.
_TWO_WAY = {"gemma3": "all layers", "gemma4": "layers with a window"}


@dataclass(frozen=True)
class ImageModel:
    """A model that takes images. ``inner``: the module whose ``get_image_features`` runs the vision tower."""

    inner: Any
    placeholder: int  # the id of a token that stands for a part of an image
    in_text: int  # the id whose embedding a placeholder gets that stands for no image
    inputs: frozenset[str]  # what `get_image_features` takes
    two_way: str | None  # in which layers a token of an image sees all of the image; None: it sees what is before it

    @property
    def has_places(self) -> bool:
        """Whether tokens of an image stand side by side for RoPE, in height and width."""
        return hasattr(self.inner, "get_rope_index")


def takes_images(model_type: str) -> bool:
    """Whether images are served for models whose config says this of itself."""
    return model_type in _SERVED


def why_no_images(model: nn.Module) -> str | None:
    """Why prompts with images cannot be served, in words that follow "and"; None if they can."""
    inner = base_model(model)
    name, kind = type(inner).__name__, inner.config.model_type
    if not hasattr(inner, "get_image_features"):
        return f"{name} takes text only"
    if (getattr(inner, "_tp_size", None) or 1) > 1:
        return f"images are not supported for a {name} whose weights are spread over several processes"
    if kind not in _SERVED or _module_of(inner) is None:
        return f"images are not supported for {name} so far: only for {', '.join(_SERVED)}"
    return None


def image_model(model: nn.Module) -> ImageModel:
    """What ``model`` asks for, which takes images."""
    inner = base_model(model)
    module = _module_of(inner)
    assert module is not None
    placeholder = getattr(inner.config, "image_token_id", None)
    if placeholder is None:
        placeholder = inner.config.image_token_index
    parameters = inspect.signature(module.get_image_features).parameters
    in_text = int(inner.config.get_text_config().pad_token_id if inner.config.model_type == "gemma4" else placeholder)
    return ImageModel(module, int(placeholder), in_text, frozenset(parameters) - {"kwargs"}, _two_way(inner))


def _two_way(inner: Any) -> str | None:
    kind = inner.config.model_type
    if kind == "gemma4" and inner.config.get_text_config().use_bidirectional_attention != "vision":
        return None  # smaller ones read images as text
    return _TWO_WAY.get(kind)


def _module_of(model: Any) -> Any:
    """The module whose own ``get_image_features`` is called in the forward pass: the one without a head."""
    inner = getattr(model, "model", None)
    return inner if hasattr(inner, "get_image_features") else None
