"""Which images the lines of a file may show.

A line is data of others. So it brings a picture with it, or names a file in a folder that the user has named. Nothing
else is read because of a line, and nothing is fetched unless the user asks for it.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from ...errors import FilesError
from ...wording import a_kind, first_line, shown
from .image_parts import NAMES_OF_SOURCES, has_images, is_image_part

_IN_OBJECTS = ("url", "bytes", "path", "detail")  # OpenAI's `image_url`, and a dataset's column of images
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://|(data|file):", re.IGNORECASE)
_FIRST_BYTES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")  # of pictures
_DRAWN_BY_PROGRAMS = ("EPS",)  # Pillow has Ghostscript run them
_PIXELS_BEHIND_A_URL = 4 << 20  # as many are reckoned with
_MOST_REMEMBERED = 1 << 16  # files
_MEDIA = frozenset(("image", "images", "video", "videos", "audio", "audios"))


class RefusedImage(Exception):
    """``why``: in words that follow "is a chat whose message 0". ``option``: whether an option would let it pass."""

    def __init__(self, why: str, option: bool = False) -> None:
        self.why = why
        self.option = option
        super().__init__(why)


class ImageSources:
    """folder: files are read from inside of it; None: no file is. urls: whether pictures are fetched."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, urls: bool = False) -> None:
        if not isinstance(urls, bool):
            raise FilesError(f"`image_urls` must be True or False, not {shown(urls)}")
        self.folder = None if folder is None else _folder(folder)
        self.urls = urls
        self._pixels: dict[str, int] = {}  # of files that were looked at

    @property
    def identity(self) -> dict[str, Any]:
        """What results depend on, by the names of the options."""
        return {"image_folder": self.folder, "image_urls": self.urls or None}

    def allowed(self, chat: Sequence[Any]) -> Sequence[Any]:
        """The chat with each image as ``generate`` takes it: bytes, a file's full path, or a URL. Else RefusedImage."""
        if not has_images(chat):
            return chat
        found = []
        for place, message in enumerate(chat):
            try:
                found.append(self._message(message))
            except RefusedImage as refused:
                raise RefusedImage(
                    f"is a chat whose message {place} holds an image {refused.why}", refused.option
                ) from None
        return found

    def pixels(self, source: str | bytes) -> int:
        """How many an image of ``allowed`` has, as its first bytes say."""
        if isinstance(source, bytes):
            return _pixels(io.BytesIO(source))
        if _URL.match(source):
            return _PIXELS_BEHIND_A_URL
        if source not in self._pixels:
            if len(self._pixels) >= _MOST_REMEMBERED:
                self._pixels.clear()
            self._pixels[source] = _pixels(source)
        return self._pixels[source]

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": [self._part(part) if is_image_part(part) else part for part in content]}

    def _part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        source = self._source(*_given(part))
        if isinstance(source, bytes) or not _URL.match(source):
            self.pixels(source)  # an error if it is no picture
        return {"type": "image", "image": source}

    def _source(self, name: str, value: str) -> str | bytes:
        if name in ("base64", "bytes") or value[:5].lower() == "data:":
            return _decoded(value)
        if _is_base64_of_a_picture(value):
            return _decoded(value)
        found = _URL.match(value)
        if found is None:
            return self._file(value, value)
        kind = (found[1] or found[2]).lower()
        if kind == "file":
            return self._file(_path_in(value), value)
        if kind not in ("http", "https"):
            raise RefusedImage(f"at {shown(value)}: a URL is http, https, data or file")
        if not self.urls:
            raise RefusedImage(
                f"at {shown(value)}, and nothing is fetched because of a line unless you ask for it: pass "
                "--image-urls (`image_urls=True`)",
                option=True,
            )
        return kind + value[len(kind) :]  # transformers knows it in small letters

    def _file(self, path: str, written: str) -> str:
        if self.folder is None:
            raise RefusedImage(
                f"in the file {shown(written)}, and no file is read because of a line unless you name the folder that "
                "it is in: pass --image-folder (`image_folder=`)",
                option=True,
            )
        try:
            found = os.path.realpath(os.path.join(self.folder, path))
            inside = os.path.commonpath([self.folder, found]) == self.folder
        except (OSError, ValueError):  # a name that no file can have; another drive
            inside = False
        if not inside:
            raise RefusedImage(
                f"in {shown(written)}, which is not in the folder {self.folder}: only files in it are read"
            )
        if not os.path.isfile(found):
            raise RefusedImage(f"that is not there: {shown(written)} is no file in {self.folder}")
        return found


def media_in(kwargs: Any) -> str | None:
    """A name in ``chat_template_kwargs`` under which a processor would read pictures, videos or sound."""
    given = kwargs if isinstance(kwargs, Mapping) else {}
    beside = given.get("processor_kwargs")
    names = [*given.items(), *(beside.items() if isinstance(beside, Mapping) else ())]
    return next((name for name, value in names if name in _MEDIA and value), None)


def _folder(given: str | os.PathLike[str]) -> str:
    try:
        name = os.path.expanduser(os.fspath(given))
    except TypeError:
        raise FilesError(f"`image_folder` must be the path of a folder, not {a_kind(given)}") from None
    if not os.path.isdir(name):
        what = "it is a file" if os.path.isfile(name) else "there is no such folder"
        raise FilesError(f"`image_folder` is {shown(name)}, and {what}")
    return os.path.realpath(name)


def _given(part: Mapping[str, Any]) -> tuple[str, str]:
    """Under which name a part has its image, and the image."""
    _check_fields(part, ("type", "detail", *NAMES_OF_SOURCES))
    given = {name: part[name] for name in NAMES_OF_SOURCES if part.get(name) is not None}
    if len(given) > 1:
        raise RefusedImage(f"part that has two, as {' and '.join(f'`{name}`' for name in given)}: keep one")
    for name, value in given.items():
        if isinstance(value, Mapping):
            _check_fields(value, _IN_OBJECTS)
            # Where a dataset has an image's bytes, the path beside them is a name.
            name, value = next(
                ((name, value[name]) for name in ("url", "bytes", "path") if value.get(name) is not None), (name, None)
            )
        if isinstance(value, str) and value:
            return name, value
        if value not in (None, ""):
            raise RefusedImage(f"that is {a_kind(value)}: it is a path, a URL or base64")
    raise RefusedImage("part without an image: give it an 'image', 'url', 'path', 'base64' or 'image_url'")


def _check_fields(fields: Mapping[str, Any], known: Sequence[str]) -> None:
    """To pass over one would show another image than was asked for."""
    if fields.get("detail") not in (None, "auto"):
        raise RefusedImage(
            f"with the `detail` {shown(fields['detail'])}, and how large it is shown is up to the processor: leave it "
            "out, or write 'auto'"
        )
    for name, value in fields.items():
        if name not in known and value is not None:
            raise RefusedImage(
                f"with {shown(name)} beside it, which is not supported: leave it out. Options of the processor go into "
                '`chat_template_kwargs`, as {"processor_kwargs": {...}}'
            )


def _is_base64_of_a_picture(text: str) -> bool:
    try:
        return "." not in text and base64.b64decode(text[:16], validate=True).startswith(_FIRST_BYTES)
    except (binascii.Error, ValueError):
        return False


def _decoded(text: str) -> bytes:
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().rstrip().endswith(";base64"):
            raise RefusedImage("in a data URL that is not base64: write data:image/png;base64,...")
    text = "".join(text.split())
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise RefusedImage("that is not base64") from None


def _path_in(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = None
    if parts is None or parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise RefusedImage(f"at {shown(url)}, which is no file on this machine: write file:///path")
    return unquote(parts.path)


def _pixels(place: str | io.BytesIO) -> int:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise FilesError("images in a file's lines need Pillow: pip install 'hf-batchllm[images]'") from error
    try:
        with Image.open(place) as picture:
            kind, size = picture.format, picture.size
    except UnidentifiedImageError:
        what = "that is no picture" if isinstance(place, io.BytesIO) else f"that is no picture: {place}"
        raise RefusedImage(what) from None
    except Exception as error:  # cut off, too many pixels, or not to be read by this user
        raise RefusedImage(f"that cannot be read ({type(error).__name__}: {first_line(error)})") from None
    if kind in _DRAWN_BY_PROGRAMS:
        raise RefusedImage(f"of the kind {kind}, which another program would draw: make a PNG of it")
    return size[0] * size[1]
