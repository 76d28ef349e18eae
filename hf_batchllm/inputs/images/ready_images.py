"""Images loaded and made into what the vision tower takes, each picture once, by several threads ahead of the chats.

To load a picture and to resize it takes a tenth of a second, nearly all of it outside of Python's lock. Results are
taken in the order of the chats, so what comes of them does not depend on which thread was first.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

from .image_parts import digest_of, loaded, sources_of

_THEIRS = "transformers."  # code that is known to keep nothing between two images
_MOST_THREADS = 8
_AHEAD = 4  # images of each thread that are ready, or being made so, and have not been taken


@dataclass(frozen=True, eq=False)
class ReadyImage:
    picture: Any
    digest: hashlib.blake2b  # of all that the processor can see
    made: Future[tuple[Mapping[str, Any], str]]  # what the tower takes, and the text that stands for the image

    @property
    def content(self) -> bytes:
        return self.digest.digest()


class ReadyImages:
    """Images made ready for the chats of one processor. ``known``: contents that need not be made again."""

    def __init__(self, processor: Any, known: Container[bytes]) -> None:
        self._processor = processor
        self._known = known
        self._lock = Lock()
        self._made: dict[bytes, Future[tuple[Mapping[str, Any], str]]] = {}
        self._ahead: ReadAhead | None = None

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
        ready: ReadyImage = self._ahead.take(name_of(source, options), (source, options))
        return ready

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


def threads_here() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_THREADS, cores)


class ReadAhead:
    """prepare: makes a source ready, in any thread. What it raises is raised where the result is taken."""

    def __init__(self, prepare: Callable[[Any], Any], threads: int) -> None:
        self._prepare = prepare
        self._most = _AHEAD * threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hf_batchllm-images")
        self._waiting: dict[Hashable, Any] = {}
        self._begun: dict[Hashable, Future[Any]] = {}

    def expect(self, name: Hashable, source: Any) -> None:
        """It will be taken, if at all, after those that were expected before it."""
        self._waiting.setdefault(name, source)

    def take(self, name: Hashable, source: Any) -> Any:
        """Once for each name."""
        while self._waiting and len(self._begun) < self._most:
            first = next(iter(self._waiting))
            self._begun[first] = self._pool.submit(self._prepare, self._waiting.pop(first))
        found = self._begun.pop(name, None)
        return self._prepare(source) if found is None else found.result()

    def close(self) -> None:
        """What has not begun never does."""
        self._waiting.clear()
        self._begun.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
