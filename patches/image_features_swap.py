"""Features of images that are known already, in the place of what a model's vision tower would make of pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .swap import Place, Swap


class ImageFeaturesSwap(Swap):
    """``inner``: the module whose forward pass calls its own ``get_image_features``, which gives ``features``."""

    def __init__(self, inner: Any, features: Any) -> None:
        super().__init__()
        self._inner = inner
        self._features = features

    def places(self) -> Iterator[Place]:
        yield vars(self._inner), "get_image_features", lambda *_, **__: self._features
        language_model = getattr(self._inner, "language_model", None)
        if hasattr(language_model, "_deepstack_process"):
            yield vars(language_model), "_deepstack_process", _added_in_place


def _added_in_place(
    hidden_states: torch.Tensor,  # [1, tokens, dim]
    visual_pos_masks: torch.Tensor,  # [1, tokens]
    visual_embeds: torch.Tensor,  # [tokens of images, dim]
) -> torch.Tensor:
    """Qwen3-VL's method in the tensor itself, which fused layers know by its identity. Nothing is waited for."""
    beside = torch.zeros_like(hidden_states)
    beside.masked_scatter_(visual_pos_masks[..., None], visual_embeds.to(hidden_states.dtype))
    return hidden_states.add_(beside)
