"""Which sizes graphs have, and which of them the steps to come will need.

A step's size depends on its rows alone, never on which graphs exist: that is a matter of timing, and the size decides
in which order cuBLAS adds numbers up. So tokens would depend on timing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

WORTHWHILE_STEPS = 8  # fewer steps to come do not pay for a capture that the device waits for
_SMALL = (1, 2, 4, 8, 16, 32, 48, 64)  # up to here a step takes about as long as reading the weights
# More rows are not always slower: on a Hopper card 448 rows of an 8B model take 13.6 ms, 512 take 10.3. On average over
# seven shapes, these sizes take 1 to 4 % longer than the best size for each number of rows, 33 % at worst. Multiples of
# 32, 64 and 128 took 2 to 6 % longer, 42 % at worst: examples/benchmarks/bench_graph_sizes.py, BENCHMARKS.md.
_SIZES = (
    *_SMALL, 96, 128, 160, 176, 208, 240, 256, 288, 320, 384, 432, 512, 576, 640, 768, 864, 960,
    *range(1024, 2048, 128), 2048,
)  # fmt: skip
DRAFT_SIZES = (16, 64, 128, 256, 512)  # of steps with tokens that are guessed: their number changes with each step
_STEP = 256  # between sizes beyond the last of these
SMALLEST_PREPARED = 16  # kernels are compiled once for all sizes that this divides
_SIZES_AHEAD = 3  # how many are prepared at a time where answers may stop before their limit


def size_of(rows: int) -> int:
    """The size of the graph for a step of so many rows."""
    return _SIZES[bisect_left(_SIZES, rows)] if rows <= _SIZES[-1] else -(-rows // _STEP) * _STEP


def draft_size_of(rows: int) -> int:
    """The same for a step with tokens that are guessed."""
    return next((size for size in DRAFT_SIZES if size >= rows), rows)


def next_smaller(size: int) -> int:
    """The next smaller size; 0 below the smallest."""
    if size > _SIZES[-1]:
        return size - _STEP
    place = bisect_left(_SIZES, size)
    return _SIZES[place - 1] if place else 0


def sizes_up_to(size: int) -> list[int]:
    """All sizes up to this one, largest first."""
    sizes = []
    while size:
        sizes.append(size)
        size = next_smaller(size)
    return sizes


def sizes_to_come(left: Sequence[int], may_stop: bool) -> list[int]:
    """The sizes that a list of prompts goes through until its end, largest first; small ones only if it stays at them.

    Very large ones are left out if it meets them once: their steps take longer than the host does to launch them, and
    their graphs take gigabytes.

    ``left``: how many tokens each of the running sequences may still get. ``may_stop``: whether some may end before
    that. Then only the next few sizes are given: ask again once some have ended.
    """
    left = sorted(left, reverse=True)
    sizes: list[int] = []
    size = size_of(len(left)) if left else 0
    while size >= SMALLEST_PREPARED:
        below = next_smaller(size)
        # How many steps have more than `below` rows, and no more than `size`.
        steps = left[below] - (left[size] if size < len(left) else 0)
        enough = WORTHWHILE_STEPS if size <= _SMALL[-1] else 1 if size <= _SIZES[-1] else 2
        if steps >= enough or (may_stop and len(sizes) < _SIZES_AHEAD):
            sizes.append(size)
        size = below
    return sizes
