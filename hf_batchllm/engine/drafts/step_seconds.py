"""How long steps of so many rows take a device, from those that were measured."""

from __future__ import annotations

from collections import deque

_LATEST = 7  # measurements of as many rows of which the second fastest counts: often the host is late, and rarely early
_FAR = 1.5  # times as many rows: two sizes that are nearer say little of others
_ROWS_FOR_TWICE = 320  # a step of so many rows more takes twice as long, before that has been measured
_STEEPEST = 4.0  # no more than so many times as much longer, whatever was measured
_LEAST = 0.3  # of the time for a step that was measured, a step of fewer rows takes so much at least


class StepSeconds:
    """share: what reading K and V of a token takes, as a part of what reading the model takes.

    Steps of as many rows may read far more of the cache, or less: answers grow, and rows of one answer read the same.
    """

    def __init__(self, share: float = 0.0) -> None:
        self._share = share
        self._latest: dict[int, deque[float]] = {}  # by the number of rows, without what reading the cache takes
        self._measured: dict[int, float] = {}  # what follows from these
        self._seconds: dict[int, float] = {}  # and from all of them together

    def note(self, rows: int, seconds: float, read: int = 0) -> None:
        """``read``: tokens whose K and V the step reads."""
        for_model = seconds / (1 + self._share * read)
        seconds = max(seconds - self._reading(read, for_model), _LEAST * seconds)
        latest = self._latest.setdefault(rows, deque(maxlen=_LATEST))
        latest.append(seconds)
        known = sorted(latest)[min(1, (len(latest) - 1) // 2)]
        if known != self._measured.get(rows):
            self._measured[rows] = known
            self._compare()

    def _compare(self) -> None:
        """What was measured of one size bounds the others: an old one may be far off, and not be measured again."""
        sizes = sorted(self._measured.items())
        longest = float("inf")
        for rows, seconds in reversed(sizes):
            longest = self._seconds[rows] = min(seconds, longest)
        for place, (rows, _) in enumerate(sizes):
            for fewer, its in sizes[:place]:
                most = its * (1 + _STEEPEST * (rows - fewer) / _ROWS_FOR_TWICE)
                self._seconds[rows] = min(self._seconds[rows], most)

    def of(self, rows: int, read: int = 0) -> float | None:
        """None before any was seen."""
        if not self._seconds:
            return None
        return self._of_rows(rows) + self._reading(read, 0.0)

    def _reading(self, read: int, for_model: float) -> float:
        """``for_model``: of a step of few rows, before any was seen."""
        return self._share * read * min(self._seconds.values(), default=for_model)

    def _of_rows(self, rows: int) -> float:
        if rows in self._seconds:
            return self._seconds[rows]
        known = sorted(self._seconds.items())
        smallest, seconds = known[0]
        largest, most = known[-1]
        if len(known) == 1 or rows > largest:  # two that are near each other say little of one that is far
            return max(most * (1 + (rows - largest) / _ROWS_FOR_TWICE), _LEAST * most)
        if rows < smallest:  # they take no longer, and no less than on a line: the fewer the rows, the less each counts
            far = next((each for each in known if each[0] >= _FAR * smallest), known[-1])
            return (seconds + max(_on_line(rows, known[0], far), _LEAST * seconds)) / 2
        place = sum(each < rows for each, _ in known)
        return max(_on_line(rows, known[place - 1], known[place]), _LEAST * known[place - 1][1])


def _on_line(rows: int, fewer: tuple[int, float], more: tuple[int, float]) -> float:
    """Through two of which the second takes no less time than the first."""
    (at, seconds), (other, longer) = fewer, more
    return seconds + max(0.0, longer - seconds) / (other - at) * (rows - at)
