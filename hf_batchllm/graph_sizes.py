"""Which sizes graphs have, and which ones the steps to come will want.

A step's size hangs on its rows alone, never on which graphs there are: when they are captured is a matter of time, and
a size decides in which order cuBLAS adds up.
"""

from __future__ import annotations

from collections.abc import Sequence

WORTH = 8  # steps still to come: fewer do not pay for a capture that the device waits for
_SMALL = (1, 2, 4, 8, 16, 32, 48, 64)  # up to here a step takes about as long as reading the weights
_STEPS = ((256, 32), (512, 64), (2048, 128))  # up to how many rows, sizes are multiples of what
_LARGEST_STEP = 256
_COMMON = 16  # kernels are compiled once for all sizes that this divides
_NEXT = 3  # sizes that are prepared at a time where answers may stop before their limit


def size_of(rows: int) -> int:
    """The rows of the graph for a step of so many."""
    for size in _SMALL:
        if rows <= size:
            return size
    multiple = next((multiple for upto, multiple in _STEPS if rows <= upto), _LARGEST_STEP)
    return -(-rows // multiple) * multiple


def next_smaller(size: int) -> int:
    """Of the sizes; 0 below the smallest."""
    if size <= _SMALL[-1]:
        return max((small for small in _SMALL if small < size), default=0)
    return size - next((multiple for upto, multiple in _STEPS if size <= upto), _LARGEST_STEP)


def sizes_to_come(left: Sequence[int], may_stop: bool) -> list[int]:
    """What a list comes to until its end, largest first; of the small ones those that it stays at.

    ``left``: how many tokens each of the sequences that run at a time may still get. ``may_stop``: before that; then
    they are the next few, and further ones once some have stopped.
    """
    left = sorted(left, reverse=True)
    sizes: list[int] = []
    size = size_of(len(left)) if left else 0
    while size >= _COMMON:
        below = next_smaller(size)
        # While more than `below` of them go on.
        steps = left[below] - (left[size] if size < len(left) else 0)
        if steps >= (1 if size > _SMALL[-1] else WORTH) or (may_stop and len(sizes) < _NEXT):
            sizes.append(size)
        size = below
    return sizes
