"""Small pictures of the images in a chat, for a table of results.

Shown are images that the chat holds as objects, and files that it names by a path. Nothing is fetched: of a URL, and of
whatever cannot be read any more, the name is shown.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .markup import shorter, text

_SIDE = 56  # pixels, of the longer side
_MOST = 4  # of a prompt
_NAME_CHARACTERS = 24
_MOST_BYTES = 20 << 20  # of a file


def thumbnails(chat: Sequence[Mapping[str, Any]]) -> str:
    """A line of pictures; empty if the chat shows none."""
    sources = list(_sources(chat))
    shown = [_one(source) for source in sources[:_MOST]]
    if len(sources) > _MOST:
        shown.append(f'<span class="hfb-dim">+ {len(sources) - _MOST:,}</span>')
    return f'<div class="hfb-images">{"".join(shown)}</div>' if shown else ""


def _sources(chat: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """An object, or a path or URL as a string, for each image part."""
    for message in chat:
        content = message.get("content")
        for part in content if isinstance(content, (list, tuple)) else ():
            if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url"):
                continue
            given = next((part[name] for name in _NAMES if part.get(name) is not None), None)
            if isinstance(given, Mapping):  # as OpenAI has it, or a dataset's column of images
                given = next((given[name] for name in ("url", "bytes", "path") if given.get(name) is not None), None)
            yield given


_NAMES = ("image", "url", "path", "base64", "image_url")  # as `inputs` has them, which stands above this room


def _one(source: Any) -> str:
    try:
        url = _as_small_jpeg(source)
    except Exception:  # a file that is gone, an object of which nothing is known, no Pillow
        url = None
    if url is None:
        return f'<span class="hfb-image">{text(_name_of(source))}</span>'
    return f'<img class="hfb-thumb" alt="{text(_name_of(source))}" src="{url}">'


def _as_small_jpeg(source: Any) -> str | None:
    from PIL import Image

    image: Image.Image
    if isinstance(source, (str, os.PathLike)):
        name = os.fspath(source)
        if not os.path.isfile(name) or os.path.getsize(name) > _MOST_BYTES:
            return None
        image = Image.open(name)
        image.draft("RGB", (_SIDE, _SIDE))  # a large JPEG is read in a small size
    elif isinstance(source, bytes):
        image = Image.open(io.BytesIO(source))
    elif isinstance(source, Image.Image):
        image = source.copy()
    else:
        image = Image.fromarray(source)
    image.thumbnail((_SIDE, _SIDE))
    if image.mode in ("RGBA", "LA", "P"):  # on white, as where there is nothing a page shows through
        coloured = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured)
    written = io.BytesIO()
    image.convert("RGB").save(written, "JPEG", quality=70)
    return f"data:image/jpeg;base64,{base64.b64encode(written.getvalue()).decode()}"


def _name_of(source: Any) -> str:
    if not isinstance(source, (str, os.PathLike)):
        return "image"
    name = os.fspath(source)
    if name.startswith("data:") or len(name) > 1000:  # base64
        return "image"
    return shorter(os.path.basename(name.rstrip("/")) or name, _NAME_CHARACTERS)
