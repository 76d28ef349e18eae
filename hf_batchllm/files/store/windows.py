"""Which records run together when not all of them fit into memory: those whose prompts begin alike."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable, Iterator
from zlib import crc32

import numpy as np

LEVELS = (64, 256, 1024, 4096, 16384)  # bytes of a prompt that a fingerprint is taken of
RECORD_COST = 512  # bytes of memory that a record takes beside its own

PromptOf = Callable[[bytes], "bytes | str | None"]

_KEYS = tuple(f'"{name}"'.encode() for name in ("messages", "prompt"))


def prompt_bytes(raw: bytes) -> bytes:
    """The prompt of a record as it is written in its JSON, and what follows; all of it where there is none.

    Nothing is parsed: a key between quotes cannot stand inside a string, where its quotes would be escaped.
    """
    for key in _KEYS:
        at = raw.find(key)
        while at >= 0:
            at += len(key)
            rest = raw[at : at + 8].lstrip()
            if rest.startswith(b":"):
                at = raw.index(b":", at) + 1
                return raw[at : at + LEVELS[-1] + 8].lstrip()
            at = raw.find(key, at)
    return raw


def fingerprints(records: Iterable[bytes], prompt_of: PromptOf | None = None) -> np.ndarray:
    """[records, levels]: checksums of the beginnings of each prompt. Chance may make two equal: a little less order."""
    prints = array.array("I")
    extend = prints.extend
    first, *further = LEVELS
    for raw in records:
        text = prompt_bytes(raw) if prompt_of is None else prompt_of(raw) or b""
        if isinstance(text, str):
            text = text[: LEVELS[-1]].encode("utf-8", "surrogatepass")
        row = [crc32(text[:first])]
        at = first
        for level in further:
            row.append(crc32(text[at:level], row[-1]) if len(text) > at else row[-1])
            at = level
        extend(row)
    return np.frombuffer(prints, dtype=np.uint32).reshape(-1, len(LEVELS))


def sharing_order(prints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[records] an order in which those that begin alike are neighbours, as near to the file's as that allows;
    [records] how many levels each shares with the one before it."""
    count = len(prints)
    order = np.lexsort(prints.T[::-1])
    shared = _shared_levels(prints[order, level] for level in range(len(LEVELS)))
    # A family stands where its first member stood: lists that share nothing are read from end to end.
    seats: list[np.ndarray] = []
    for level in range(int(shared.max(initial=0))):
        heads = np.flatnonzero(shared <= level)
        eldest = np.minimum.reduceat(order, heads).astype(np.int32)
        seats.append(np.repeat(eldest, np.diff(np.append(heads, count))))
    if not seats:
        return np.arange(count), shared
    again = np.lexsort([order, *seats[::-1]])
    return order[again], _shared_levels(seat[again] for seat in seats)


def _shared_levels(levels: Iterable[np.ndarray]) -> np.ndarray:
    """[records] how many levels each has in common with the one before it, counted from the first."""
    shared = np.zeros(0, dtype=np.uint8)
    for place, prints in enumerate(levels):
        if place == 0:
            shared = np.zeros(len(prints), dtype=np.uint8)
            alike = np.ones(max(len(prints) - 1, 0), dtype=bool)
        alike &= prints[1:] == prints[:-1]
        shared[1:] += alike
    return shared


def cut(order: np.ndarray, shared: np.ndarray, cost: np.ndarray, window: int) -> Iterator[np.ndarray]:
    """Stretches of ``order`` of about ``window`` together, cut where the least is shared.

    ``shared`` and ``cost`` are those of the records in ``order``. A window's own records are in the file's order.
    """
    total = np.cumsum(cost, dtype=np.int64)
    first, count = 0, len(order)
    while first < count:
        before = int(total[first - 1]) if first else 0
        last = max(int(np.searchsorted(total, before + window, side="right")), first + 1)
        if last < count:
            early = max(int(np.searchsorted(total, before + window * 3 // 4, side="right")), first + 1)
            places = shared[early : last + 1]
            last = early + len(places) - 1 - int(np.argmin(places[::-1]))
        yield np.sort(order[first:last])
        first = last
