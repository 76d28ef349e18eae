"""Images loaded and made into what the vision tower takes, by several threads, each picture once."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import Any

from .image_parts import digest_of, loaded, sources_of
from .read_ahead import ReadAhead, threads_here

_THEIRS = "transformers."  # code that is known to keep nothing between two images


@dataclass(frozen=True, eq=False)
class ReadyImage:
    picture: Any
    digest: hashlib.blake2b  # of all that the processor can see
    made: Future[tuple[Mapping[str, Any], str]]  # what the tower takes, and the text that stands for the image

    @property
    def content(self) -> bytes:
        return self.digest.digest()


class ReadyImages:
    """Of the chats of one processor. ``known``: contents that need not be made again."""

    def __init__(self, processor: Any, known: Container[bytes]) -> None:
        self._processor = processor
        self._known = known
        self._lock = Lock()
        self._made: dict[bytes, Future[tuple[Mapping[str, Any], str]]] = {}
        self._ahead: ReadAhead[ReadyImage] | None = None

    def look_ahead(self, chats: Sequence[Any], options: dict[str, Any]) -> None:
        """Images of these chats will be taken in this order, with these options of the processor."""
        threads = threads_here()
        classes = type(self._processor), type(self._processor.image_processor)
        if threads == 1 or len(chats) < 2 or not all(cls.__module__.startswith(_THEIRS) for cls in classes):
            return
        self._ahead = ReadAhead(self._ready, threads)
        for chat in chats:
            for source in sources_of(chat):
                self._ahead.expect(name_of(source, options), (source, options))

    def take(self, source: Any, options: dict[str, Any]) -> ReadyImage:
        """Once for each source."""
        if self._ahead is None:
            return self._ready((source, options))
        return self._ahead.take(name_of(source, options), (source, options))

    def drop(self, content: bytes) -> None:
        """It is ``known`` now."""
        self._made.pop(content, None)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def _ready(self, given: tuple[Any, dict[str, Any]]) -> ReadyImage:
        source, options = given
        picture = loaded(source)
        digest = digest_of(picture, options)
        content = digest.digest()
        with self._lock:
            mine = content not in self._made
            made = self._made.setdefault(content, Future())
        if mine and content not in self._known:
            try:
                process: Any = type(self._processor)._process_images
                inputs, (text,) = process(self._processor, [[picture]], **{**options, "return_tensors": "pt"})
                made.set_result((inputs, text))
            except BaseException as error:  # raised where the result is taken, or others would wait for ever
                made.set_exception(error)
        return ReadyImage(picture, digest, made)


def name_of(source: Any, options: dict[str, Any]) -> tuple[object, str]:
    """Equal for one object, and for equal paths, URLs and bytes, if the processor is given the same options."""
    return (source if isinstance(source, (str, bytes)) else id(source)), repr(options)
