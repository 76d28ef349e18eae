"""A pipeline whose processor makes the pixels of an image once, however many prompts of a call show it."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
from transformers import BatchFeature, ImageTextToTextPipeline, Pipeline, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin

from ..inputs.images.image_parts import digest_of

_MOST_LOADED = 8  # pictures by their names, of which one may be 100 MB
_MOST_OF_SEVERAL = 4  # of what is made of several images together; what is made of one is there until the call ends


def with_remembered_images(pipe: Pipeline) -> Pipeline:
    """A copy, for one call, whose processor makes the pixels of an image once; or the pipeline as it is."""
    processor: Any = pipe.processor
    inner = getattr(processor, "image_processor", None)
    is_stock = getattr(pipe.preprocess, "__func__", None) is ImageTextToTextPipeline.preprocess
    if not is_stock or not isinstance(processor, ProcessorMixin) or not isinstance(inner, ImageProcessingMixin):
        return pipe
    remembering = copy.copy(pipe)
    remembering.processor = copy.copy(processor)
    remembering.processor.image_processor = _RememberingImageProcessor(inner, pipe.dtype)
    return remembering


class _RememberingImageProcessor:
    """Takes the place of an image processor. ``dtype``: what the pipeline makes of pixels, so that tensors stay."""

    def __init__(self, inner: Any, dtype: torch.dtype | None) -> None:
        self._inner, self._dtype = inner, dtype
        self._load = lru_cache(_MOST_LOADED)(inner.fetch_images)
        self._of_one: dict[object, BatchFeature] = {}
        self._of_several: dict[object, BatchFeature] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def fetch_images(self, named: Any) -> Any:
        if isinstance(named, list | tuple):
            return [self.fetch_images(each) for each in named]
        return self._load(named) if isinstance(named, str) else self._inner.fetch_images(named)

    def __call__(self, images: Any, **options: Any) -> Any:
        named = _name_of(images)
        if named is None:
            return self._inner(images, **options)
        kept = self._of_one if _is_one(named) else self._of_several
        name = named, repr(options)
        if name not in kept:
            kept[name] = self._inner(images, **options).to(dtype=self._dtype)
        if len(self._of_several) > _MOST_OF_SEVERAL:
            del self._of_several[next(iter(self._of_several))]
        return BatchFeature({**kept[name]})  # the processor takes some of it out


def _name_of(images: Any) -> object:
    """By content, and as nested as they are; None if any of them is not a picture of PIL's."""
    from PIL import Image

    if isinstance(images, list | tuple):
        names = tuple(_name_of(each) for each in images)
        return None if not names or None in names else names
    return digest_of(images).digest() if isinstance(images, Image.Image) else None


def _is_one(named: object) -> bool:
    return _is_one(named[0]) if isinstance(named, tuple) and len(named) == 1 else not isinstance(named, tuple)
