"""The inputs of a pipeline for images, in the forms that transformers' own code takes; or why one is bad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers.image_utils import valid_images
from transformers.utils.chat_template_utils import Chat

from ..errors import PromptsTypeError
from ..inputs.chats import is_chat, is_message
from ..wording import a_kind, first_line
from .pipeline_inputs import BadInput, as_inputs, as_text_input

_TEXT_AND_IMAGES = "{'images': ..., 'text': ...}"


def as_image_inputs(images: Any, text: Any) -> Any:
    """What both arguments of a call say, as one: a string, a Chat, text and images in a dict, or several of them."""
    if images is not None and text is not None:
        if isinstance(text, Chat) or is_chat(text) or (isinstance(text, list | tuple) and text and is_chat(text[0])):
            raise PromptsTypeError("chats hold their images themselves: pass them without `images`")
        return {"images": images, "text": text}
    given = images if text is None else text
    if isinstance(given, Mapping):
        return as_image_input(given)
    is_list = isinstance(images, list | tuple)
    if text is None and (images if is_list else not isinstance(images, Iterator)) and valid_images(images):
        raise PromptsTypeError("there are images, and no text: pass `text`, too, or a chat that shows them")
    return as_inputs(given, as_image_input)


def as_image_input(given: Any) -> Any:
    """A string, a Chat, a dict of text and images, or a BadInput."""
    if isinstance(given, Mapping) and not is_message(given):
        if given.get("text") is None or given.get("images") is None:
            return BadInput(f"is {a_kind(given)}; text with images is {_TEXT_AND_IMAGES}, and text alone a string")
        return dict(given)
    if is_chat(given) and any(_has_openais_images(message) for message in given):
        return BadInput(
            "is a chat that holds a part of type 'image_url', which transformers' pipelines pass over: write "
            "{'type': 'image', 'url': ...}"
        )
    return as_text_input(given, images=True)


def why_not_processed(given: Any, error: Exception) -> str:
    """Why the processor could not take an input, in words that follow "prompt 3"."""
    what = "a string" if isinstance(given, str) else "a chat" if isinstance(given, Chat) else "text with images"
    return f"is {what} that the processor refused: {first_line(error)}"


def _has_openais_images(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list | tuple) else ()
    return any(isinstance(part, Mapping) and part.get("type") == "image_url" for part in parts)
