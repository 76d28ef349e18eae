"""Which sizes graphs have, and which ones the steps to come will want.

A step's size hangs on its rows alone, never on which graphs there are: when they are captured is a matter of time, and
a size decides in which order cuBLAS adds up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

WORTH = 8  # steps still to come: fewer do not pay for a capture that the device waits for
_SMALL = (1, 2, 4, 8, 16, 32, 48, 64)  # up to here a step takes about as long as reading the weights
# Products of more rows are not always slower: on a Hopper card 448 rows of an 8B model take 13.6 ms, 512 take 10.3.
# These take 1 to 4 % more than the best there is on the mean of seven shapes, 33 % at worst; multiples of 32, 64 and
# 128 took 2 to 6 %, 42 % at worst: examples/benchmarks/bench_graph_sizes.py, BENCHMARKS.md.
_SIZES = (
    *_SMALL, 96, 128, 160, 176, 208, 240, 256, 288, 320, 384, 432, 512, 576, 640, 768, 864, 960,
    *range(1024, 2048, 128), 2048,
)  # fmt: skip
_STEP = 256  # beyond
_COMMON = 16  # kernels are compiled once for all sizes that this divides
_NEXT = 3  # sizes that are prepared at a time where answers may stop before their limit


def size_of(rows: int) -> int:
    """The rows of the graph for a step of so many."""
    return _SIZES[bisect_left(_SIZES, rows)] if rows <= _SIZES[-1] else -(-rows // _STEP) * _STEP


def next_smaller(size: int) -> int:
    """Of the sizes; 0 below the smallest."""
    if size > _SIZES[-1]:
        return size - _STEP
    place = bisect_left(_SIZES, size)
    return _SIZES[place - 1] if place else 0


def sizes_up_to(size: int) -> list[int]:
    """All that there are, largest first."""
    sizes = []
    while size:
        sizes.append(size)
        size = next_smaller(size)
    return sizes


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
