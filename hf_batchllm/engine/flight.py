"""A step on its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..planning.requests_and_prefixes import Request
from ..planning.step import Step
from .timekeeper import Stretch


@dataclass
class Flight:
    """A step that was launched and not collected yet."""

    step: Step
    sampling: list[Request]
    counts: list[int]  # the most tokens that each of them may get
    wait: Callable[[], np.ndarray]
    record: Stretch
    replayed: bool  # as a CUDA graph
    began: float  # by the clock of time.perf_counter
    launched: float  # by the same clock
    steady: bool = True  # whether other steps take as long: nothing was captured meanwhile
