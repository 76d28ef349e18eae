"""A prompt's token ids and its images, put together: keys that tell images apart, and places for RoPE."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .image_models import ImageModel
from .prompt_images import Image, PromptImages
from .rope_places import RopePlaces


class OutOfPlace(Exception):
    """Images stand where this model cannot have them. In words that follow "the prompt"."""


def with_images(
    model: ImageModel, ids: Sequence[int] | np.ndarray, shown: tuple[Image, ...], rope: RopePlaces
) -> PromptImages:
    """``shown``: one at least, in the order in which they stand. The ids have as many placeholders as they take."""
    keys = np.array(ids, dtype=np.int32)
    at = np.flatnonzero(keys == model.placeholder)
    if model.has_places and _touch(at, shown):
        raise OutOfPlace("shows two images with nothing between them, which this model takes for one: not supported")
    places = rope.of(keys, at, shown) if model.has_places else None
    two_way = None if model.two_way is None else _runs(at, shown, len(keys))
    keys[at] = np.concatenate([image.first_key + np.arange(image.tokens) for image in shown])
    return PromptImages(keys, shown, places, two_way)


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
