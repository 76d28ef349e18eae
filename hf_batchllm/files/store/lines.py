"""Where the lines of a file are: offsets in arrays. The bytes are read from the disk when they are needed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_BLOCK = 4 << 20  # bytes searched for newlines at once
_STRETCH = 4 << 20  # most bytes read at once, of neighbouring lines
_GAP = 4 << 10  # fewer bytes between two lines are read and dropped
_BOM = b"\xef\xbb\xbf"


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Fewer than ``size`` bytes only at the end of the file."""
    pieces: list[bytes] = []
    while size:
        if hasattr(os, "pread"):
            piece = os.pread(descriptor, min(size, 1 << 30), offset)
        else:
            os.lseek(descriptor, offset, os.SEEK_SET)
            piece = os.read(descriptor, min(size, 1 << 30))
        if not piece:
            break
        pieces.append(piece)
        size -= len(piece)
        offset += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class ShortRead(Exception):
    """The file has become shorter than it was."""


@dataclass(eq=False)
class Lines:
    """The lines of a file, without blank ones, numbered from 0."""

    descriptor: int
    starts: np.ndarray  # [lines] offset of the first byte
    sizes: np.ndarray  # [lines] bytes, without the newline
    blanks: np.ndarray  # [blank lines] number of each among all lines of the file, from 0
    end: int  # bytes of the file
    ended: bool  # the last line has its newline
    digest: str = ""

    def __len__(self) -> int:
        return len(self.starts)

    def line(self, number: int) -> int:
        """The line's number among all lines of the file, from 1."""
        before = self.blanks - np.arange(len(self.blanks))  # lines that are not blank before each blank one
        return number + 1 + int(np.searchsorted(before, number, side="right"))

    def read(self, numbers: Sequence[int] | np.ndarray) -> list[bytes]:
        """These lines, in this order. Neighbours in the file are read together."""
        asked = np.asarray(numbers, dtype=np.int64)
        order = np.argsort(self.starts[asked], kind="stable")
        starts = self.starts[asked[order]].tolist()
        ends = (self.starts[asked[order]] + self.sizes[asked[order]]).tolist()
        found: list[bytes] = [b""] * len(starts)
        places = order.tolist()
        first = 0
        while first < len(starts):
            begin, end, last = starts[first], ends[first], first + 1
            while last < len(starts) and starts[last] <= end + _GAP and ends[last] - begin <= _STRETCH:
                end = max(end, ends[last])
                last += 1
            stretch = read_at(self.descriptor, end - begin, begin)
            if len(stretch) < end - begin:
                raise ShortRead
            for each in range(first, last):
                line = stretch[starts[each] - begin : ends[each] - begin]
                found[places[each]] = line[:-1] if line.endswith(b"\r") else line
            first = last
        return found

    def chunks(self, numbers: np.ndarray | None = None, size: int = 16 << 20) -> Iterator[np.ndarray]:
        """``numbers`` in their order, about ``size`` bytes at a time."""
        numbers = np.arange(len(self)) if numbers is None else numbers
        total = np.cumsum(self.sizes[numbers], dtype=np.int64)
        first = 0
        while first < len(numbers):
            before = int(total[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(total, before + size, side="right")))
            last = min(last, first + (1 << 16))
            yield numbers[first:last]
            first = last


def find_lines(descriptor: int, *, digest: bool = False) -> Lines:
    """Reads all bytes of the file once."""
    hashed = hashlib.blake2b(digest_size=16) if digest else None
    begins = [np.zeros(1, dtype=np.int64)]  # offsets at which lines begin; after the last newline, too
    suspect: list[np.ndarray] = [
        np.zeros(1, dtype=np.int64)
    ]  # offsets of lines that begin with white space and may be blank
    end, fresh = 0, False  # fresh: the byte before this block is a newline
    while block := read_at(descriptor, _BLOCK, end):
        if hashed is not None:
            hashed.update(block)
        data = np.frombuffer(block, dtype=np.uint8)
        after = np.flatnonzero(data == 0x0A) + 1
        inside = after[after < len(data)]
        suspect.append(inside[data[inside] <= 0x20] + end)
        if fresh and data[0] <= 0x20:
            suspect.append(np.array([end]))
        begins.append(after + end)
        fresh = bool(data[-1] == 0x0A)
        end += len(block)
    edges = np.concatenate(begins)
    ended = end == 0 or fresh
    if ended:
        starts, sizes = edges[:-1], np.diff(edges) - 1
    else:
        starts, sizes = edges, np.diff(np.append(edges, end + 1)) - 1
    if len(starts) and read_at(descriptor, len(_BOM), 0) == _BOM:
        starts[0] += len(_BOM)
        sizes[0] -= len(_BOM)
        suspect[0] = starts[:1]
    suspects = np.searchsorted(starts, np.unique(np.concatenate(suspect)))
    blanks = [
        number
        for number in suspects.tolist()
        if number < len(starts) and not read_at(descriptor, int(sizes[number]), int(starts[number])).strip()
    ]
    if blanks:
        keep = np.ones(len(starts), dtype=bool)
        keep[blanks] = False
        starts, sizes = starts[keep], sizes[keep]
    if not len(sizes) or int(sizes.max()) < 1 << 32:
        sizes = sizes.astype(np.uint32)  # a third of the memory of ten million lines
    return Lines(
        descriptor,
        starts,
        sizes,
        np.array(blanks, dtype=np.int64),
        end,
        ended,
        hashed.hexdigest() if hashed is not None else "",
    )
