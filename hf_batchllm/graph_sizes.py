"""Which sizes graphs have, which of them serves for so many rows, and which ones steps to come will want."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WORTH = 8  # steps still to come: fewer do not pay for a capture that the device waits for
_SPARE = 1.3  # a graph that is there and is no larger than so many times what is needed will do
_ALIKE = 64  # rows up to which a step takes about as long as reading the weights
_MANY = 32  # steps of so few rows that pay for a graph of their own
_NEXT = 3  # sizes, the present one among them, that are wanted where nobody knows whether they will be passed
_PASSED = 2  # steps of a size that pay for a capture that the device does not wait for


def bucket_of(rows: int) -> int:
    """The rows of the graph for a step of so many."""
    for upto, size in ((8, 1), (64, 8), (256, 16), (1024, 64)):
        if rows <= upto:
            return -(-rows // size) * size
    return -(-rows // 256) * 256


def fitting(sizes: Iterable[int], rows: int) -> int | None:
    """Of the sizes that there are, the one for so many rows."""
    most = max(bucket_of(rows), _SPARE * rows)
    return min((size for size in sizes if rows <= size <= most), default=None)


def larger(sizes: Iterable[int], rows: int, steps: int) -> int | None:
    """One that is larger than it need be, if steps to come are too few for one of their own."""
    size = min((size for size in sizes if size >= rows), default=None)
    return size if size is not None and steps < (_MANY if size <= _ALIKE else WORTH) else None


def sizes_to_come(left: Sequence[int], may_stop: bool) -> list[int]:
    """What a list comes to until its end, largest first: graphs of these sizes serve for all but a few of its steps.

    ``left``: how many tokens each of the sequences that run at a time may still get. ``may_stop``: before that; then
    they are the next few, and further ones once some have stopped.
    """
    left = sorted(left, reverse=True)
    sizes: list[int] = []
    rows = len(left)
    while rows > 0:
        size = -(-bucket_of(rows) // 16) * 16  # kernels are compiled once for all multiples of 16
        below = 0 if size <= _ALIKE else int(size / _SPARE)
        # While more than `below` of them go on.
        steps = left[below] - (left[size] if size < len(left) else 0)
        if steps >= (_PASSED if size > _ALIKE else WORTH) or (may_stop and len(sizes) < _NEXT):
            sizes.append(size)
        rows = min(below, rows - 1)
    return sizes
