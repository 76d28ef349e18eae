"""A prompt's token ids and its images, put together: keys that tell images apart, and places for RoPE."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .image_models import ImageModel
from .prompt_images import Image, PromptImages, PromptPlaces

_MOST_KEPT = 256


class OutOfPlace(Exception):
    """Images stand where this model cannot have them. In words that follow "the prompt"."""


class PlacedImages:
    """Puts images into the prompts of one model."""

    def __init__(self, model: ImageModel) -> None:
        self._model = model
        # int32 [3, tokens]  of the longest prompt so far with images of these sizes in these places
        self._longest: dict[tuple[bytes, bytes], np.ndarray] = {}

    def of(self, ids: Sequence[int] | np.ndarray, shown: tuple[Image, ...]) -> PromptImages:
        """``shown``: one at least, in the order in which they stand. The ids have as many placeholders as they take."""
        keys = np.array(ids, dtype=np.int32)
        at = np.flatnonzero(keys == self._model.placeholder)
        if self._model.has_places and _touch(at, shown):
            raise OutOfPlace(
                "shows two images with nothing between them, which this model takes for one: not supported"
            )
        places = self._rope_places(keys, at, shown) if self._model.has_places else None
        two_way = None if self._model.two_way is None else _runs(at, shown, len(keys))
        keys[at] = np.concatenate([image.first_key + np.arange(image.tokens) for image in shown])
        return PromptImages(keys, shown, places, two_way)

    def _rope_places(self, ids: np.ndarray, at: np.ndarray, shown: Sequence[Image]) -> PromptPlaces:
        """The places that the model itself gives. ids: int32 [tokens]; at: [placeholders] where they are

        Where a token stands does not depend on what follows it, so a shorter prompt has a part of a longer one's.
        """
        grids = torch.cat([image.inputs["image_grid_thw"] for image in shown])
        key = at.tobytes(), grids.numpy().tobytes()
        longest = self._longest.get(key)
        if longest is None or longest.shape[1] < len(ids):
            tokens = torch.tensor(ids[None], dtype=torch.long, device="cpu")
            places, _ = self._model.inner.get_rope_index(
                input_ids=tokens,
                mm_token_type_ids=(tokens == self._model.placeholder).int(),
                image_grid_thw=grids,
                attention_mask=torch.ones_like(tokens),
            )
            longest = places[:, 0].cpu().numpy().astype(np.int32)
            if len(self._longest) == _MOST_KEPT:
                self._longest.clear()
            self._longest[key] = longest
        own = longest[:, : len(ids)]
        # A token behind the prompt stands behind the furthest one of it.
        return PromptPlaces(own, int(own.max()) + 1 - len(ids))


def _runs(at: np.ndarray, images: Sequence[Image], tokens: int) -> np.ndarray:
    """Begin and end of each run of placeholders [runs, 2], whose tokens see each other both ways.

    at: [placeholders]  the places of all of them
    """
    breaks = np.flatnonzero(np.diff(at) > 1)
    runs = np.stack([at[np.append(0, breaks + 1)], at[np.append(breaks, len(at) - 1)] + 1], axis=1)
    if _touch(at, images):
        raise OutOfPlace("shows two images with nothing between them, so that each would see the other: not supported")
    if runs[-1, 1] == tokens:
        raise OutOfPlace("ends with an image: in this model something must follow it, as its template has it")
    longer: np.ndarray = runs[runs[:, 1] - runs[:, 0] > 1]
    return longer


def _touch(at: np.ndarray, images: Sequence[Image]) -> bool:
    """Whether an image begins where another ends."""
    first = np.cumsum([image.tokens for image in images])[:-1]  # placeholders with which the next image begins
    return bool((at[first] == at[first - 1] + 1).any())
