"""How many rows a product on a GPU is computed with: more than it has, where it is faster so.

A library chooses a kernel by a product's sizes. Where its choice would cut sums into parts, and it may not, it can take
one that is very slow: on an H200 the last product of an 8B model's layers took 320 us with 2 to 16 rows, and 33 us with
24. More rows are computed only where all numbers of rows that are tried give a row the same bits. So the times that are
measured here decide about no token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
MOST = SIZES[-1]  # rows: with more no product was slow
FEWEST = SIZES[0]  # libraries have kernels for one row alone, which cut its sums into parts
_ALSO_COMPARED = (3, 5, 7, 12, 17, 33, 100)
_WORTHWHILE = 0.8  # of the time: rows are copied first
_COPY = 3e-6  # seconds
_MOST_KINDS = 1000  # a product of two activations may be another kind each time

_CALLS = 4  # of a measurement
_TURNS = 3  # of all sizes: what slows one of them slows its neighbours, and not the next turn
_WAIT = 800_000  # cycles of a GPU, in which the host launches these calls

Rows = Callable[[torch.Tensor], torch.Tensor]  # a product of some rows


class PaddedRows:
    def __init__(
        self, seconds: Callable[[Callable[[], Any], torch.device], float], may_measure: Callable[[], bool]
    ) -> None:
        """seconds: that something takes on a device."""
        self._seconds = seconds
        self._may_measure = may_measure
        self._sizes: dict[tuple[Any, ...], tuple[int, ...]] = {}  # for each of ``SIZES``, by kinds of product

    def of(self, rows: int, run: Rows, kind: tuple[Any, ...], x: torch.Tensor) -> int:
        """How many rows to compute for so many, which are no more than ``MOST``.

        run: the product of rows like those of ``x``. kind: all that its kernel may depend on, but for their number.
        """
        sizes = self._sizes.get(kind)
        if sizes is None:
            if len(self._sizes) >= _MOST_KINDS or not self._may_measure():
                return max(rows, FEWEST)
            sizes = self._sizes[kind] = self._measured(run, x)
        at = bisect_left(SIZES, rows)
        return sizes[at] if sizes[at] > SIZES[at] else max(rows, FEWEST)

    def _measured(self, run: Rows, x: torch.Tensor) -> tuple[int, ...]:
        try:
            noise = torch.Generator(x.device).manual_seed(0)  # of its own: no draw of a call may depend on this
            some = torch.randn(MOST, x.shape[-1], dtype=x.dtype, device=x.device, generator=noise)
            # Another process may measure other times. Where bits differ, nothing hides it from the trial of the model.
            every = run(some)
            if not all(torch.equal(run(some[:size]), every[:size]) for size in (*SIZES, *_ALSO_COMPARED)):
                return SIZES
            del every
            turns = [
                [self._seconds(lambda size=size: run(some[:size]), x.device) for size in SIZES]  # type: ignore[misc]
                for _ in range(_TURNS)
            ]
        except torch.OutOfMemoryError:  # the product itself has fewer rows: it may be slow, and it fits
            return SIZES
        return faster_sizes([min(each) for each in zip(*turns, strict=True)])


def faster_sizes(seconds: Sequence[float]) -> tuple[int, ...]:
    """The fastest size that is no smaller, for each of ``SIZES``: another one only if it is worth a copy."""
    chosen = []
    for at, (size, its) in enumerate(zip(SIZES, seconds, strict=True)):
        fastest = min(range(at, len(SIZES)), key=seconds.__getitem__)
        pays = seconds[fastest] + _COPY < _WORTHWHILE * its
        chosen.append(SIZES[fastest] if pays else size)
    return tuple(chosen)


def seconds_on_a_gpu(run: Callable[[], Any], device: torch.device) -> float:
    """After ``run`` has run: its kernel is loaded."""
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_WAIT)  # else what is measured is how fast the host launches
        begin.record()
        for _ in range(_CALLS):
            run()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / _CALLS


def nothing_is_captured() -> bool:
    return not torch.cuda.is_current_stream_capturing()
