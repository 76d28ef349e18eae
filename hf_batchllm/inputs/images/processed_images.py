"""What a processor has made of prompts with images, taken in as it is: token ids, and pixels as tensors.

A batch has the pixels of all its rows in one tensor. They are taken apart into images, and equal ones have equal keys.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import BatchFeature

from ...errors import UnsupportedOptionError
from ...wording import a_kind
from ..base_model import base_model
from ..token_ids import BadPrompt
from .image_models import ImageModel, image_model, why_no_images
from .image_parts import UnreadableImage
from .image_shares import INSTEAD, TokensOfImages, UnclearImages, shares_of_images
from .placed_images import OutOfPlace, PlacedImages
from .prompt_images import IMAGE_TENSORS, IMAGE_TOKEN_TYPES, EncodedChat, Image, PromptImages

_TYPES = (IMAGE_TOKEN_TYPES, "token_type_ids")
_AS_TENSORS = 'give the processor `return_tensors="pt"`'


class ProcessedImages:
    """For one call. ``key_of``: gives an image, by its digest, so many keys that follow each other: the first."""

    def __init__(self, model: nn.Module, key_of: Callable[[bytes, int], int]) -> None:
        self._owners = model
        self._key_of = key_of
        self._by_content: dict[bytes, Image] = {}
        # A caller may pass the same tensors for many prompts. With the tensors: else their ids could become others'.
        self._by_tensors: dict[tuple[int, ...], tuple[list[Any], list[Image]]] = {}

    @cached_property
    def _model(self) -> ImageModel:
        return image_model(self._owners)

    @cached_property
    def _placed(self) -> PlacedImages:
        return PlacedImages(self._model)

    @staticmethod
    def takes(prompt: Any) -> bool:
        """Whether it is what a processor makes of a prompt, with images or without."""
        if isinstance(prompt, EncodedChat):
            return True
        if not isinstance(prompt, Mapping) or "input_ids" not in prompt:
            return False
        return isinstance(prompt, BatchFeature) or any(name in prompt for name in (*IMAGE_TENSORS, IMAGE_TOKEN_TYPES))

    def prompt(self, given: Mapping[str, Any] | EncodedChat) -> EncodedChat | BadPrompt:
        """One prompt, as a processor gives it; or as it was taken in before."""
        if isinstance(given, EncodedChat):
            return given
        rows = self.prompts(given)
        if isinstance(rows, BadPrompt) or len(rows) == 1:
            return rows if isinstance(rows, BadPrompt) else rows[0]
        return BadPrompt(
            f"holds {len(rows)} rows: pass what the processor makes of each prompt by itself, or unpack it, "
            "generate(**inputs)"
        )

    def prompts(self, given: Mapping[str, Any]) -> list[EncodedChat] | BadPrompt:
        """All rows of what a processor gives."""
        beside = {name: value for name, value in given.items() if name not in ("input_ids", "attention_mask")}
        for name in beside:
            if name not in (*IMAGE_TENSORS, *_TYPES):
                return BadPrompt(f"holds `{name}`, which is not supported: text and images are")
        ids = _integers(given["input_ids"])
        if ids is None or 0 in ids.shape:
            return BadPrompt(f"holds no token ids as its `input_ids`: {_AS_TENSORS}")
        has_mask = given.get("attention_mask") is not None
        mask = _integers(given["attention_mask"]) if has_mask else torch.ones_like(ids)
        if mask is None or mask.shape != ids.shape:
            return BadPrompt("holds an `attention_mask` of another shape than its `input_ids`")
        rows = [_unpadded(row, kept) for row, kept in zip(ids.cpu().numpy(), mask.cpu().numpy() != 0, strict=True)]
        good = [row for row in rows if isinstance(row, np.ndarray)]
        if len(good) < len(rows):
            return next(row for row in rows if isinstance(row, BadPrompt))
        try:
            shown = self._shown(ids, good, beside)
        except UnclearImages as unclear:
            return BadPrompt(f"holds `{unclear.name}`, which {unclear.why}")
        return [EncodedChat(row, images) for row, images in zip(good, shown, strict=True)]

    def of_batch(
        self, ids: torch.Tensor, rows: Sequence[np.ndarray], beside: Mapping[str, Any]
    ) -> list[PromptImages | None]:
        """What each row shows. ``ids``: with padding; ``rows``: without; ``beside``: what goes with them."""
        try:
            return self._shown(ids, rows, beside)
        except UnclearImages as unclear:
            raise UnsupportedOptionError(unclear.name, unclear.why) from None

    def _shown(
        self, ids: torch.Tensor, rows: Sequence[np.ndarray], beside: Mapping[str, Any]
    ) -> list[PromptImages | None]:
        beside = {name: value for name, value in beside.items() if value is not None}
        given = {name: value for name, value in beside.items() if name in IMAGE_TENSORS}
        why_not = why_no_images(self._owners) if beside else None
        if why_not is not None:
            raise UnclearImages(next(iter(beside)), f"cannot be taken: {why_not}")
        for name in beside.keys() - given.keys():
            self._check_types(name, _integers(beside[name]), ids)
        if not given:
            return [None] * len(rows)
        tokens = TokensOfImages.of(rows, self._model.placeholder)
        if not tokens.total:
            raise UnclearImages(next(iter(given)), "is passed, and no token of the rows stands for an image")
        images = self._images(given, tokens)
        ends = np.cumsum([0, *(image.tokens for image in images)])
        ends_of_rows = np.cumsum([0, *tokens.of_rows])
        if not np.isin(ends_of_rows, ends).all():
            raise UnclearImages("pixel_values", f"has an image that begins in a row and ends in the next: {INSTEAD}")
        cuts = np.searchsorted(ends, ends_of_rows).tolist()
        shown = [tuple(images[begin:end]) for begin, end in pairwise(cuts)]
        try:
            return [self._placed.of(row, some) if some else None for row, some in zip(rows, shown, strict=True)]
        except OutOfPlace as error:
            raise UnclearImages("input_ids", str(error)) from None

    def _check_types(self, name: str, types: torch.Tensor | None, ids: torch.Tensor) -> None:
        """Whether they say of each token what its id says."""
        if types is None or types.shape != ids.shape:
            raise UnclearImages(name, f"is no tensor of the shape of `input_ids`: {_AS_TENSORS}")
        expected = (ids == self._model.placeholder).long()
        matters = name in inspect.signature(base_model(self._owners).forward).parameters
        if matters and not torch.equal(types.long().to(ids.device), expected):
            raise UnclearImages(
                name, "marks other tokens than those that stand for images: videos and audio are not supported"
            )
        if not matters and name != IMAGE_TOKEN_TYPES and types.any():
            raise UnclearImages(name, f"has no meaning to {type(base_model(self._owners)).__name__}: leave it out")

    # -- images ----------------------------------------------------------------------------------------------------

    def _images(self, given: Mapping[str, Any], tokens: TokensOfImages) -> list[Image]:
        name = (*tokens.runs, *(id(value) for value in given.values()))
        if name in self._by_tensors:
            return self._by_tensors[name][1]
        tensors = {name: _on_cpu(name, value) for name, value in given.items()}
        before = len(self._by_content)
        config: Any = base_model(self._owners).config
        shares = shares_of_images(config.model_type, config, tensors, tokens)
        images = [self._image(count, inputs) for count, inputs in shares]
        if len(self._by_content) > before:  # else nothing of these tensors is kept but their ids
            self._by_tensors[name] = [*given.values()], images
        return images

    def _image(self, tokens: int, inputs: dict[str, torch.Tensor]) -> Image:
        kinds = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in inputs.items()]
        digest = hashlib.blake2b(f"{tokens}{kinds}".encode(), digest_size=16, person=b"processed")
        for tensor in inputs.values():
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        content = digest.digest()
        if content not in self._by_content:
            try:
                first = self._key_of(content, tokens)
            except UnreadableImage as error:
                raise UnclearImages("pixel_values", f"holds an image {error}") from None
            self._by_content[content] = Image(first, tokens, inputs)
        return self._by_content[content]


def _unpadded(ids: np.ndarray, kept: np.ndarray) -> np.ndarray | BadPrompt:
    columns = np.flatnonzero(kept)
    if not len(columns):
        return BadPrompt("is all padding: it has no token to begin from")
    if columns[-1] - columns[0] >= len(columns):
        return BadPrompt("is masked in its middle: padding belongs at the ends of a row")
    return ids[columns[0] : columns[-1] + 1]


def _integers(value: Any) -> torch.Tensor | None:
    """The integers as rows; None if the value holds none."""
    try:
        tensor = torch.as_tensor(value, device=None if isinstance(value, torch.Tensor) else "cpu")
    except Exception:
        return None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta or tensor.ndim not in (1, 2):
        return None
    return tensor.reshape(-1, tensor.shape[-1])


def _on_cpu(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        raise UnclearImages(name, f"is {a_kind(value)}: {_AS_TENSORS}")
    if value.is_meta:
        raise UnclearImages(name, "is on the meta device, where tensors have no values")
    return value.detach().cpu()
