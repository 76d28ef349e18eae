"""What the tests of pipelines for images share: how one is made, and what it is given."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support_image_prompts import PICTURED, model_of, picture, processor_of, shows, user, words
from transformers import pipeline

PAGE, OTHER = picture(1, 64, 96), picture(2, 96, 64)
CHATS: list[Any] = [
    user(shows(PAGE), words(3, 4, 5)),
    user(words(5), shows(OTHER), words(6), shows(PAGE), words(7)),
    user(shows(PAGE), words(9)),
    user(words(8, 9)),
]
GREEDY: dict[str, Any] = {"max_new_tokens": 5}  # transformers' own writes into `generate_kwargs` that it is passed


def made(task: str, family: str, **given: Any) -> Any:
    """Of copies: a pipeline pads, and sets what its model generates with."""
    processor, model = copy.copy(processor_of(family)), copy.copy(model_of(family))
    processor.tokenizer = copy.deepcopy(processor.tokenizer)
    processor.tokenizer.pad_token, processor.tokenizer.padding_side = "w0", "left"
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return pipeline(task, **{"model": model, "processor": processor, "device": "cpu", **given})


def placeholder(family: str) -> str:
    return PICTURED[family].shown


@contextmanager
def pictures_made(pipe: Any) -> Iterator[list[int]]:
    """How many pictures the image processor makes pixels of, in each of its calls."""
    counts: list[int] = []
    kind = type(pipe.processor.image_processor)
    original = kind.__call__

    def counting(self: Any, images: Any, *args: Any, **options: Any) -> Any:
        counts.append(_size(images))
        return original(self, images, *args, **options)

    kind.__call__ = counting
    try:
        yield counts
    finally:
        kind.__call__ = original


def _size(images: Any) -> int:
    return sum(map(_size, images)) if isinstance(images, list | tuple) else 1
