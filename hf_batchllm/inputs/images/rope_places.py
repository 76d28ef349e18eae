"""Where tokens of prompts with images stand for RoPE, as the model says: worked out once for images of equal sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .image_models import ImageModel
from .prompt_images import Image, PromptPlaces

_MOST_KEPT = 256


class RopePlaces:
    """Of one model, in which tokens of an image stand side by side.

    Tokens of text stand one behind the other. So the model is asked about what is from the first image to the last,
    with a token of text on each side, and the rest is counted. What comes of it is compared with the model's own
    answer once for each side that has more text.
    """

    def __init__(self, model: ImageModel) -> None:
        self._model = model
        self._kept: dict[tuple[bytes, int, bytes], np.ndarray] = {}
        self._counts_otherwise = False
        self._compared: set[str] = set()  # what a comparison has shown to be counted right

    def of(self, ids: np.ndarray, at: np.ndarray, shown: Sequence[Image]) -> PromptPlaces:
        """ids: int32 [tokens]; at: [placeholders] where they are"""
        grids = torch.cat([image.inputs["image_grid_thw"] for image in shown])
        begin, end = max(int(at[0]) - 1, 0), min(int(at[-1]) + 2, len(ids))
        if self._counts_otherwise:
            return self._asked(ids, grids)
        key = (at - begin).tobytes(), int(at[-1]) + 1 - end, grids.numpy().tobytes()
        between = self._kept.get(key)
        if between is None:
            between = self._asked(ids[begin:end], grids).of_prompt
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = between
        counted = _with_text(between, before=begin, behind=len(ids) - end)
        counts = {"what follows"} | ({"before"} if begin > 0 else set()) | ({"behind"} if end < len(ids) else set())
        if counts <= self._compared:
            return counted
        own = self._asked(ids, grids)
        if np.array_equal(counted.of_prompt, own.of_prompt) and counted.behind == own.behind:
            self._compared |= counts
        else:
            self._counts_otherwise = True
        return own

    def _asked(self, ids: np.ndarray, grids: torch.Tensor) -> PromptPlaces:
        tokens = torch.tensor(ids[None], dtype=torch.long, device="cpu")
        places, behind = self._model.inner.get_rope_index(
            input_ids=tokens,
            mm_token_type_ids=(tokens == self._model.placeholder).int(),
            image_grid_thw=grids,
            attention_mask=torch.ones_like(tokens),
        )
        return PromptPlaces(places[:, 0].cpu().numpy().astype(np.int32), int(behind.item()))


def _with_text(places: np.ndarray, before: int, behind: int) -> PromptPlaces:
    """places: int32 [3, tokens]. On each side where there is more text, they have a token of it."""
    count = places.shape[1]
    whole = np.empty((3, before + count + behind), np.int32)
    whole[:, :before] = np.arange(before)
    whole[:, before : before + count] = places + before
    whole[:, before + count :] = whole[:, before + count - 1, None] + np.arange(1, behind + 1)
    # A token behind the prompt stands behind the furthest one of it.
    return PromptPlaces(whole, int(whole.max()) + 1 - whole.shape[1])
