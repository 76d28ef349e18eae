"""How many rows a product on a GPU is computed with: a few more than it has, where it is faster so.

A library chooses a kernel by a product's sizes. Where its choice would cut sums into parts, and it may not, it can take
one that is very slow: on an H200 the last product of an 8B model's layers took 320 us with 2 to 16 rows, and 33 us with
24. More rows are computed only where each number of rows gives a row the same bits. So the times that are measured here
decide about no token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
MOST = SIZES[-1]  # rows: with more no product was slow
FEWEST = SIZES[0]  # libraries have kernels for one row alone, which cut its sums into parts
_WORTHWHILE = 0.8  # of the time: rows are copied first
_COPY = 3e-6  # seconds

_CALLS = 4  # of a measurement
_TURNS = 2  # of which the faster counts
_WAIT = 1_000_000  # cycles of a GPU, in which the host launches these calls


class PaddedRows:
    def __init__(self, seconds: Callable[[Callable[[], Any], torch.device], float | None]) -> None:
        """seconds: that something takes on a device, or None where that cannot be measured now."""
        self._seconds = seconds
        self._sizes: dict[tuple[Any, ...], tuple[int, ...]] = {}  # for each of ``SIZES``, by kinds of product

    def of(self, rows: int, run: Callable[[torch.Tensor], Any], kind: tuple[Any, ...], x: torch.Tensor) -> int:
        """How many rows to compute for so many, which are no more than ``MOST``.

        run: the product of rows like those of ``x``. kind: all that its kernel may depend on, but for their number.
        """
        sizes = self._sizes.get(kind)
        if sizes is None:
            sizes = self._measured(run, x)
            if sizes is None:
                return max(rows, FEWEST)
            self._sizes[kind] = sizes
        at = bisect_left(SIZES, rows)
        return sizes[at] if sizes[at] > SIZES[at] else max(rows, FEWEST)

    def _measured(self, run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> tuple[int, ...] | None:
        noise = torch.Generator(x.device).manual_seed(0)  # of its own: no draw of a call may depend on this
        some = torch.randn(MOST, x.shape[-1], dtype=x.dtype, device=x.device, generator=noise)
        seconds = []
        for size in SIZES:
            rows = some[:size]
            its = self._seconds(lambda rows=rows: run(rows), x.device)  # type: ignore[misc]
            if its is None:
                return None
            seconds.append(its)
        # Another process may measure other times. Where bits differ, nothing hides it from the trial of the model.
        every = run(some)
        if not all(torch.equal(run(some[:size]), every[:size]) for size in SIZES):
            return SIZES
        return faster_sizes(seconds)


def faster_sizes(seconds: Sequence[float]) -> tuple[int, ...]:
    """The fastest size that is no smaller, for each of ``SIZES``: another one only if it is worth a copy."""
    chosen = []
    for at, (size, its) in enumerate(zip(SIZES, seconds, strict=True)):
        fastest = min(range(at, len(SIZES)), key=seconds.__getitem__)
        pays = seconds[fastest] + _COPY < _WORTHWHILE * its
        chosen.append(SIZES[fastest] if pays else size)
    return tuple(chosen)


def seconds_on_a_gpu(run: Callable[[], Any], device: torch.device) -> float | None:
    """None while a graph is captured: nothing runs then."""
    if torch.cuda.is_current_stream_capturing():
        return None
    with torch.cuda.device(device):
        run()  # its kernel is loaded
        turns = []
        for _ in range(_TURNS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(_WAIT)  # else what is measured is how fast the host launches
            begin.record()
            for _ in range(_CALLS):
                run()
            end.record()
            end.synchronize()
            milliseconds: float = begin.elapsed_time(end)
            turns.append(milliseconds / 1e3 / _CALLS)
    return min(turns)
