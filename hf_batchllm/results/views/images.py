"""Small pictures of the images in a chat: of objects, and of files that it names by a path. Nothing is fetched."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from .html import shorter, text

_SIDE = 56  # pixels, of the longer side
_MOST = 4  # of a prompt
_NAME_CHARACTERS = 24
_MOST_BYTES = 20 << 20  # of a file
# Where a part of a chat has its image; and within that, where it is as OpenAI or a dataset's column of images has it.
_PLACES = ("image", "url", "path", "base64", "image_url")
_PLACES_WITHIN = ("url", "bytes", "path")


def thumbnails(chat: Sequence[Mapping[str, Any]]) -> str:
    """A line of pictures; empty if the chat shows none. What cannot be read here is shown by its name."""
    sources = list(_sources(chat))
    if not sources:
        return ""
    more = f'<span class="hfb-dim">+ {len(sources) - _MOST:,}</span>' if len(sources) > _MOST else ""
    return f'<div class="hfb-images">{"".join(map(_shown, sources[:_MOST]))}{more}</div>'


def _sources(chat: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    contents = (message.get("content") for message in chat)
    for part in (part for content in contents if isinstance(content, (list, tuple)) for part in content):
        if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
            source = _first(part, _PLACES)
            yield _first(source, _PLACES_WITHIN) if isinstance(source, Mapping) else source


def _first(part: Mapping[str, Any], places: Sequence[str]) -> Any:
    return next((part[place] for place in places if part.get(place) is not None), None)


def _shown(source: Any) -> str:
    name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""
    is_name = name and not name.startswith("data:") and len(name) <= 1000  # or else base64
    label = text(shorter(os.path.basename(name.rstrip("/")) or name, _NAME_CHARACTERS)) if is_name else "image"
    with suppress(Exception):  # a file that is gone, an object of which nothing is known, no Pillow
        return f'<img class="hfb-thumb" alt="{label}" src="data:image/jpeg;base64,{_small_jpeg(source, name)}">'
    return f'<span class="hfb-image">{label}</span>'


def _small_jpeg(source: Any, name: str) -> str:
    """In base64. Raises anything if there is no image."""
    from PIL import Image

    image: Image.Image
    if name:
        if not os.path.isfile(name) or os.path.getsize(name) > _MOST_BYTES:
            raise ValueError("no file, or a large one")
        image = Image.open(name)
        image.draft("RGB", (_SIDE, _SIDE))  # a large JPEG is read in a small size
    elif isinstance(source, bytes):
        image = Image.open(io.BytesIO(source))
    else:
        image = source.copy() if isinstance(source, Image.Image) else Image.fromarray(source)
    image.thumbnail((_SIDE, _SIDE))
    if image.mode in ("RGBA", "LA", "P"):  # on white, as where there is nothing a page shows through
        coloured = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured)
    written = io.BytesIO()
    image.convert("RGB").save(written, "JPEG", quality=70)
    return base64.b64encode(written.getvalue()).decode()
