"""The image parts of a chat: found, and loaded through transformers."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...wording import a_kind, first_line, is_array, shown

NAMES_OF_SOURCES = ("image", "url", "path", "base64", "image_url")  # of a part, the first that it has
_SECONDS_TO_LOAD = 30  # that a server may take


def is_image_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def has_images(chat: Sequence[Any]) -> bool:
    return any(is_image_part(part) for message in chat for part in _parts(message))


def source_of(part: Mapping[str, Any]) -> Any:
    """What the part says of its image: an object, or a path, a URL or base64 as a string. None if nothing."""
    for name in NAMES_OF_SOURCES:
        given = part.get(name)
        if isinstance(given, Mapping):  # as OpenAI has it, or a dataset's column of images
            given = next((given[each] for each in ("url", "bytes", "path") if given.get(each) is not None), None)
        if given is not None:
            return os.fspath(given) if isinstance(given, os.PathLike) else given
    return None


def sources_of(chat: Sequence[Any]) -> list[Any]:
    return [source_of(part) for message in chat for part in _parts(message) if is_image_part(part)]


def with_bare_parts(chat: Sequence[Any]) -> list[dict[str, Any]]:
    """The chat for a template, which looks only at where images stand."""
    return [
        {**message, "content": [{"type": "image"} if is_image_part(part) else part for part in message["content"]]}
        if _parts(message)
        else dict(message)
        for message in chat
    ]


class UnreadableImage(Exception):
    """With the reason, in words that follow "holds an image"."""


def loaded(source: Any) -> Any:
    """The image as the processor gets it: an object of PIL's as it is, anything else in RGB."""
    from PIL import Image
    from transformers.image_utils import load_image

    if source is None:
        raise UnreadableImage("part without an image: give it an 'image', 'url' or 'path'")
    if isinstance(source, str) and _is_a_missing_file(source):
        raise UnreadableImage(f"that is not there: no file is called {shown(source)}")
    try:
        if is_array(source):
            source = Image.fromarray(_as_bytes(np.asarray(source)))
        as_it_is = isinstance(source, Image.Image)
        if not as_it_is and hasattr(source, "read"):
            source = source.read()
        if isinstance(source, bytes):  # as base64, it would be taken for the name of a file if there is one
            source = Image.open(io.BytesIO(source))
        image: Any = source if as_it_is else load_image(source, timeout=_SECONDS_TO_LOAD)
        image.load()
    except UnreadableImage:
        raise
    except Exception as error:  # a file that is missing or cut off, a server that does not answer, a bomb of pixels
        raise UnreadableImage(f"that cannot be read ({type(error).__name__}: {first_line(error)})") from error
    if 0 in image.size:
        raise UnreadableImage(f"of {image.width} x {image.height} pixels")
    return image


def digest_of(image: Any, *beside: object) -> hashlib.blake2b:
    """A digest of all that a processor can see of a PIL picture, and of what is done with it ``beside``."""
    colours = image.getpalette(), image.info.get("transparency")
    digest = hashlib.blake2b(f"{image.size}{image.mode}{colours!r}{beside!r}".encode(), digest_size=16)
    digest.update(image.tobytes())
    return digest


def _is_a_missing_file(source: str) -> bool:
    if source.startswith(("http://", "https://", "data:", "file:")):
        return False
    return "." in source and not os.path.isfile(source)  # a picture in base64 has no dot


def _as_bytes(array: np.ndarray) -> np.ndarray:  # [height, width, 3]
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype != np.uint8:
        raise UnreadableImage(
            f"given as an array of {array.dtype}, of which it is not known what white is: pass whole numbers from 0 to "
            "255, as uint8"
        )
    if array.ndim not in (2, 3):
        raise UnreadableImage(f"given as {a_kind(array)} with {array.ndim} dimensions: an image has 2 or 3")
    return array


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, (list, tuple)) else ()
