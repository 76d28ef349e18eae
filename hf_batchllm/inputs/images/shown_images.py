"""A prompt's token ids and its images, put together: keys that tell images apart, and places for RoPE."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .image_models import ImageModel
from .prompt_images import Image, PromptImages, PromptPlaces


def with_images(model: ImageModel, ids: Sequence[int] | np.ndarray, shown: tuple[Image, ...]) -> PromptImages:
    """``shown``: one at least, in the order in which they stand. The ids have as many placeholders as they take."""
    keys = np.array(ids, dtype=np.int32)
    at = np.flatnonzero(keys == model.placeholder)
    places = _places(model, keys, shown)
    keys[at] = np.concatenate([image.first_key + np.arange(image.tokens) for image in shown])
    return PromptImages(keys, shown, places)


def _places(model: ImageModel, ids: np.ndarray, shown: Sequence[Image]) -> PromptPlaces | None:
    if not model.has_places:
        return None
    tokens = torch.tensor(ids[None], dtype=torch.long, device="cpu")
    grids = torch.cat([image.inputs["image_grid_thw"] for image in shown])
    places, behind = model.inner.get_rope_index(
        input_ids=tokens,
        mm_token_type_ids=(tokens == model.placeholder).int(),
        image_grid_thw=grids,
        attention_mask=torch.ones_like(tokens),
    )
    return PromptPlaces(places[:, 0].cpu().numpy().astype(np.int32), int(behind.item()))
