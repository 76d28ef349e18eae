"""How long steps of so many rows take a device, from those that were measured."""

from __future__ import annotations

_FASTER, _SLOWER = 0.5, 0.1  # how much the latest counts: a host that is late makes a step look slower than it is
_ROWS_FOR_TWICE = 320  # a step of so many rows more takes twice as long, before that has been measured
_STEEPEST = 4.0  # no more than so many times as much longer, whatever was measured
_LEAST = 0.3  # of the time for a step that was measured, a step of fewer rows takes so much at least


class StepSeconds:
    """share: what reading K and V of a token takes, as a part of what reading the model takes.

    Steps of as many rows may read far more of the cache, or less: answers grow, and rows of one answer read the same.
    """

    def __init__(self, share: float = 0.0) -> None:
        self._share = share
        self._seconds: dict[int, float] = {}  # by the number of rows, without what reading the cache takes

    def note(self, rows: int, seconds: float, read: int = 0) -> None:
        """``read``: tokens whose K and V the step reads."""
        for_model = seconds / (1 + self._share * read)
        seconds = max(seconds - self._reading(read, for_model), _LEAST * seconds)
        known = self._seconds.setdefault(rows, seconds)
        known += (_FASTER if seconds < known else _SLOWER) * (seconds - known)
        self._seconds[rows] = known
        for other, its in self._seconds.items():  # an old one may be far off, and not be measured again for long
            if other < rows:
                self._seconds[other] = min(its, known)
            elif other > rows:
                self._seconds[other] = min(its, known * (1 + _STEEPEST * (other - rows) / _ROWS_FOR_TWICE))

    def of(self, rows: int, read: int = 0) -> float | None:
        """None before any was seen."""
        if not self._seconds:
            return None
        return self._of_rows(rows) + self._reading(read, 0.0)

    def _reading(self, read: int, for_model: float) -> float:
        """``for_model``: of a step of few rows, before any was seen."""
        return self._share * read * min(self._seconds.values(), default=for_model)

    def _of_rows(self, rows: int) -> float:
        """On a line between those with fewer and with more rows, or through the next two with more."""
        if rows in self._seconds:
            return self._seconds[rows]
        known = sorted(self._seconds.items())
        largest, seconds = known[-1]
        if len(known) == 1 or rows > largest:  # two that are near each other say little of one that is far
            return max(seconds * (1 + (rows - largest) / _ROWS_FOR_TWICE), _LEAST * seconds)
        place = max(sum(each < rows for each, _ in known), 1)  # of them have fewer rows
        (at, seconds), (other, more) = known[place - 1 : place + 1]
        return max(seconds + max(0.0, (more - seconds) / (other - at)) * (rows - at), _LEAST * seconds)
