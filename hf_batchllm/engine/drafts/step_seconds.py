"""How long steps of so many rows take a device, from those that were measured."""

from __future__ import annotations

_FASTER, _SLOWER = 0.5, 0.1  # how much the latest counts: a host that is late makes a step look slower than it is
_ROWS_FOR_TWICE = 320  # a step of so many rows more takes twice as long, before that has been measured
_STEEPEST = 4.0  # no more than so many times as much longer, whatever was measured
_LEAST = 0.3  # of the time for a step that was measured, a step of fewer rows takes so much at least


class StepSeconds:
    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by the number of rows

    def note(self, rows: int, seconds: float) -> None:
        known = self._seconds.setdefault(rows, seconds)
        known += (_FASTER if seconds < known else _SLOWER) * (seconds - known)
        self._seconds[rows] = known
        for other, its in self._seconds.items():  # an old one may be far off, and not be measured again for long
            if other < rows:
                self._seconds[other] = min(its, known)
            elif other > rows:
                self._seconds[other] = min(its, known * (1 + _STEEPEST * (other - rows) / _ROWS_FOR_TWICE))

    def of(self, rows: int) -> float | None:
        """On a line between those with fewer and with more rows, or through the next two. None before any was seen."""
        if rows in self._seconds:
            return self._seconds[rows]
        known = sorted(self._seconds.items())
        if not known:
            return None
        if len(known) == 1:
            (at, seconds), slope = known[0], known[0][1] / _ROWS_FOR_TWICE
        else:
            place = sum(each < rows for each, _ in known)  # of them have fewer rows
            place = min(max(place, 1), len(known) - 1)
            (at, seconds), (other, more) = known[place - 1 : place + 1]
            slope = max(0.0, (more - seconds) / (other - at))
            if rows > other:
                at, seconds = other, more
        return max(seconds + slope * (rows - at), _LEAST * seconds)
