"""What a prompt with images has beside its token ids. No torch but for types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

# Tokens of images have keys from here on, so that equal keys mean equal images. No vocabulary is as large.
FIRST_KEY = 1 << 30

# What a processor gives beside token ids: tensors of images, and which tokens stand for one.
IMAGE_TENSORS = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_position_ids", "image_sizes")
IMAGE_TOKEN_TYPES = "mm_token_type_ids"


@dataclass(frozen=True, eq=False)
class Image:
    """One image, however many prompts show it."""

    first_key: int
    tokens: int  # places that it takes in a prompt; their keys follow each other
    inputs: Mapping[str, torch.Tensor]  # what the model's ``get_image_features`` is called with

    @property
    def values(self) -> int:
        """Numbers that the vision tower reads."""
        return max(tensor.numel() for tensor in self.inputs.values())


@dataclass(frozen=True, eq=False)
class PromptPlaces:
    """Where tokens stand for RoPE, if an image takes less room there than it has tokens."""

    of_prompt: np.ndarray  # int32 [3, tokens]  in time, height and width
    behind: int  # what is added to the position of a token behind the prompt, in all three

    def at(self, begin: int, end: int) -> np.ndarray:  # [3, tokens]
        """The places of the tokens at positions ``[begin, end)``."""
        length = self.of_prompt.shape[1]
        if end <= length:
            return self.of_prompt[:, begin:end]
        new = np.broadcast_to(np.arange(max(begin, length), end) + self.behind, (3, end - max(begin, length)))
        return np.concatenate([self.of_prompt[:, begin:], new], axis=1)


@dataclass(frozen=True, eq=False)
class PromptImages:
    keys: np.ndarray  # int32 [tokens]  the prompt's ids, but for those of images
    images: tuple[Image, ...]  # in the order in which they stand; one that stands twice is there twice
    places: PromptPlaces | None  # None: where their positions are
    # int64 [runs, 2]  begin and end of each run of tokens that see all of the run, also what is behind them; None: none
    two_way: np.ndarray | None = None

    def followed_by(self, ids: np.ndarray) -> PromptImages:
        """The images of a prompt that goes on with text. ids: int32 [tokens]"""
        return replace(self, keys=np.concatenate([self.keys, ids]))


@dataclass(frozen=True, eq=False)
class EncodedChat:
    ids: Sequence[int] | np.ndarray
    images: PromptImages | None
