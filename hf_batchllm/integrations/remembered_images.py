"""A pipeline whose processor makes the pixels of an image once, however many prompts of a call show it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from transformers import BatchFeature, ImageTextToTextPipeline, Pipeline, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin

from ..inputs.images.image_parts import digest_of

_MOST_LOADED = 8  # pictures by their names, of which one may be 100 MB
_MOST_OF_SEVERAL = 4  # of what is made of several images together; what is made of one is there until the call ends


def with_remembered_images(pipe: Pipeline) -> Pipeline:
    """For ``preprocess``, in one call: a copy; or the pipeline itself, if not all is transformers' own."""
    processor: Any = pipe.processor
    inner = getattr(processor, "image_processor", None)
    own: Any = type(pipe).preprocess
    is_stock = own is ImageTextToTextPipeline.preprocess and "preprocess" not in vars(pipe)
    if not is_stock or not isinstance(processor, ProcessorMixin) or not isinstance(inner, ImageProcessingMixin):
        return pipe
    remembering = copy.copy(pipe)
    remembering.processor = copy.copy(processor)
    remembering.processor.image_processor = _RememberingImageProcessor(inner, pipe.dtype)
    return remembering


class _RememberingImageProcessor:
    """Takes the place of an image processor in a copy of the processor."""

    def __init__(self, inner: Any, dtype: torch.dtype | None) -> None:
        self._inner = inner
        self._dtype = dtype  # which the pipeline gives pixels anyway; so the same tensor comes out each time
        self._loaded: OrderedDict[str, Any] = OrderedDict()
        self._of_one: dict[object, BatchFeature] = {}
        self._of_several: OrderedDict[object, BatchFeature] = OrderedDict()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def fetch_images(self, named: Any) -> Any:
        if isinstance(named, list | tuple):
            return [self.fetch_images(each) for each in named]
        if not isinstance(named, str):
            return self._inner.fetch_images(named)
        if named not in self._loaded:
            self._loaded[named] = self._inner.fetch_images(named)
        self._loaded.move_to_end(named)
        if len(self._loaded) > _MOST_LOADED:
            self._loaded.popitem(last=False)
        return self._loaded[named]

    def __call__(self, images: Any, **options: Any) -> Any:
        named = _name_of(images)
        if named is None:
            return self._inner(images, **options)
        kept = self._of_one if _is_one(named) else self._of_several
        name = named, repr(options)
        if name not in kept:
            kept[name] = self._inner(images, **options).to(dtype=self._dtype)
        if len(self._of_several) > _MOST_OF_SEVERAL:
            self._of_several.popitem(last=False)
        return BatchFeature({**kept[name]})  # the processor takes some of it out


def _name_of(images: Any) -> object:
    """By content, and as nested as they are; None if any of them is not a picture of PIL's."""
    from PIL import Image

    if isinstance(images, list | tuple):
        names = tuple(_name_of(each) for each in images)
        return None if not names or None in names else names
    return digest_of(images).digest() if isinstance(images, Image.Image) else None


def _is_one(named: object) -> bool:
    while isinstance(named, tuple) and len(named) == 1:
        named = named[0]
    return not isinstance(named, tuple)
