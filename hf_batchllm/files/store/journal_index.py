"""Which results a journal holds and where they stand, in arrays: ten million results take some hundred megabytes."""

from __future__ import annotations

from array import array

import numpy as np


class JournalIndex:
    """A "place" is that of a result among all results of the journal, in the order of its lines."""

    def __init__(self) -> None:
        self._numbers = array("q")  # [results] of the record that each one answers
        self._starts, self._sizes = array("q"), array("q")  # [results] first byte; bytes, with the newline
        self._keys = array("Q")  # [results] as 48-bit numbers; empty after ``forget_keys``
        self._is_error = bytearray()  # [results]

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int, start: int, size: int, is_error: bool = False) -> None:
        self._numbers.append(number)
        self._starts.append(start)
        self._sizes.append(size)
        self._is_error.append(is_error)

    def add_key(self, key: int) -> None:
        self._keys.append(key)

    def forget_keys(self) -> None:
        del self._keys[:]

    def shorten(self, count: int) -> None:
        """Drops all but the first ``count`` results. An interrupt may have left the arrays at different lengths."""
        for each in (self._numbers, self._starts, self._sizes, self._is_error):
            del each[count:]

    def keep(self, places: np.ndarray) -> None:
        """These results alone, in this order."""
        for each in (self._numbers, self._starts, self._sizes, self._keys):
            if len(each):
                kept = np.frombuffer(each, dtype=each.typecode)[places]
                del each[:]
                each.frombytes(kept.tobytes())
        self._is_error = bytearray(np.frombuffer(bytes(self._is_error), dtype=np.uint8)[places].tobytes())

    def place_anew(self, sizes: array[int]) -> int:
        """One result after the other, from the first byte of the file on; returns where the last one ends."""
        ends = np.cumsum(np.array(sizes, dtype=np.int64))
        self._sizes, self._starts = sizes, array("q", (ends - np.array(sizes, dtype=np.int64)).tobytes())
        return int(ends[-1]) if len(ends) else 0

    @property
    def end(self) -> int:
        """Where the last result ends."""
        return self._starts[-1] + self._sizes[-1] if self._starts else 0

    @property
    def total_size(self) -> int:
        return sum(self._sizes)

    @property
    def numbers(self) -> np.ndarray:
        return np.array(self._numbers, dtype=np.int64)

    @property
    def starts(self) -> np.ndarray:
        return np.array(self._starts, dtype=np.int64)

    @property
    def sizes(self) -> np.ndarray:
        """With the newline."""
        return np.array(self._sizes, dtype=np.int64)

    @property
    def is_error(self) -> np.ndarray:
        return np.frombuffer(bytes(self._is_error), dtype=bool)

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """([results] the numbers of the records, ascending; their keys). Until ``forget_keys``."""
        numbers, keys = self.numbers, np.array(self._keys, dtype=np.uint64)
        order = np.argsort(numbers, kind="stable")
        return numbers[order], keys[order]

    def order(self) -> np.ndarray:
        """The places, by the numbers of their records."""
        return np.argsort(self.numbers, kind="stable")

    def duplicates(self) -> np.ndarray:
        """Places of results whose record has an earlier result."""
        order = self.order()
        numbers = self.numbers[order]
        duplicates: np.ndarray = order[1:][numbers[1:] == numbers[:-1]]
        return duplicates
