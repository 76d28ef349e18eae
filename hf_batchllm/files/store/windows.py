"""Which records run together when not all fit into memory: records whose prompts begin alike."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable, Iterator
from zlib import crc32

import numpy as np

LEVELS = (64, 256, 1024, 4096, 16384)  # first bytes of a prompt, each with a checksum
RECORD_COST = 512  # bytes of memory that a record takes beside its text

PromptOf = Callable[[bytes], "bytes | str | None"]


def fingerprints(records: Iterable[bytes], prompt_of: PromptOf | None = None) -> np.ndarray:
    """[records, levels]: checksums of the beginnings of each prompt. Two that are equal by chance do little harm."""
    prints = array.array("I")
    extend = prints.extend
    first, *further = LEVELS
    for raw in records:
        text = raw if prompt_of is None else prompt_of(raw) or b""
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
    """[records] an order in which records that begin alike are neighbours, otherwise as in the file;
    [records] how many levels each one shares with the one before it."""
    count = len(prints)
    order = np.lexsort(prints.T[::-1])
    shared = _shared_levels(prints[order, level] for level in range(len(LEVELS)))
    # A family stands where its first member stood: a list that shares nothing keeps its order.
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
    """Cuts ``order`` into windows that cost about ``window`` each, where the least is shared.

    ``shared`` and ``cost`` belong to the records in ``order``. Within a window, records are in the file's order.
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
