"""What steps take, from those that have run.

The bar asks ``StepCosts``, for all steps to come. Drafts ask what a few rows more take: ``Times`` where the host picks
each token, ``StepSeconds`` where a device does. Admission and the sizes of graphs ask none: they must not depend on a
clock.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from torch import nn

# What a step costs by itself, and what an answer token costs, each in prompt tokens: a guess until steps have shown it.
# Reading the weights takes a GPU as long as computing some hundred tokens, and a CPU as long as a few dozen.
STEP_ON_GPU, STEP_ON_CPU, _ANSWER_TOKEN = 300.0, 32.0, 1.5
_MOST_FOR_HEAD = 4.0
_MEMORY = 1 - 1 / 128  # what a step counts for after the next one: answers grow, and machines get busy
_APART = 16.0  # times as much longer or shorter than usual, beside prompts, all else may seem to take

_KEPT = 0.97  # what a measurement counts for after the next one, where a line goes through them
_LATEST = 7  # measurements of as many rows of which the second fastest counts: often the host is late, and rarely early
_FAR = 1.5  # times as many rows: two sizes that are nearer say little of others
_ROWS_FOR_TWICE = 320  # a step of so many rows more takes twice as long, before that has been measured
_STEEPEST = 4.0  # no more than so many times as much longer, whatever was measured
_LEAST = 0.3  # of the time for a step that was measured, a step of fewer rows takes so much at least


class StepCosts:
    """The seconds of steps: usual costs times two rates, one for reading prompts and one for writing answers.

    The steps that have run set the rates. What a step costs by itself counts as writing, in steps with prompts too.
    ``head``: as ``cost_of_head`` has it.
    """

    def __init__(self, on_gpu: bool = False, head: float = 1.0) -> None:
        self._step = head * (STEP_ON_GPU if on_gpu else STEP_ON_CPU)
        self._answer_token = head * _ANSWER_TOKEN
        self._reading, self._writing = _Rate(), _Rate()
        self._steps = 0  # learnt from

    def learn(self, steps: int, prompt_tokens: int, answer_tokens: int, seconds: float) -> float:
        """Learns from steps that ran one after the other. Returns the share of their time that prompts took.

        The rates so far, or the usual costs before there are any, say which part of the seconds is whose.
        """
        written = self._step * steps + self._answer_token * answer_tokens
        reading, writing = self._rates() or (1.0, 1.0)
        ratio = min(max(writing / reading, 1 / _APART), _APART)
        share = prompt_tokens / (prompt_tokens + ratio * written)
        keep = 0.0 if self._steps == 1 else _MEMORY  # the first step compiles and allocates: it is no measure
        self._reading.learn(share * seconds, prompt_tokens, keep)
        self._writing.learn((1 - share) * seconds, written, keep)
        self._steps += 1
        return share

    def __call__(self, steps: float, prompt_tokens: float, answer_tokens: float) -> float:
        """The seconds that these will take."""
        reading, writing = self._rates() or (0.0, 0.0)
        return reading * prompt_tokens + writing * (self._step * steps + self._answer_token * answer_tokens)

    def _rates(self) -> tuple[float, float] | None:
        """Where only one of them is known, it stands for the other."""
        known = [rate.seconds / rate.units for rate in (self._reading, self._writing) if rate.units]
        return (known[0], known[-1]) if known else None


class _Rate:
    """The seconds and the usual costs of some work, the latest of it above all."""

    seconds = units = 0.0

    def learn(self, seconds: float, units: float, keep: float) -> None:
        if units or not keep:
            self.seconds = keep * self.seconds + seconds
            self.units = keep * self.units + units


def cost_of_head(model: nn.Module, vocabulary: int) -> float:
    """How much more the model computes with its LM head, which answers run through and prompts do not.

    In a small model with a large vocabulary the head is most of it.
    """
    every = tables = head = 0
    for weight in model.parameters():
        every += weight.numel()
        if weight.ndim == 2 and weight.shape[0] == vocabulary:
            tables += weight.numel()
            head = max(head, weight.numel())
    return min(1 + head / max(every - tables, 1), _MOST_FOR_HEAD)


class Times:
    """Seconds of a step by its tokens: a line through what was measured, the latest of it above all."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of weights, tokens, seconds, tokens squared, tokens times seconds
        self._slope: float | None = None

    def note(self, tokens: int, seconds: float) -> None:
        self._sums = _KEPT * self._sums + [1, tokens, seconds, tokens * tokens, tokens * seconds]
        x, y, xx, xy = (self._sums[1:] / self._sums[0]).tolist()
        if xx - x * x > 1e-3:  # steps of different sizes
            self._slope = max((xy - x * y) / (xx - x * x), 0.0)

    @property
    def any(self) -> bool:
        return bool(self._sums[0] > 0)

    def line(self) -> tuple[float, float] | None:
        """Seconds of a step, and of each of its tokens beside; None before steps of two sizes have been seen."""
        if self._slope is None:
            return None
        x, y = (self._sums[1:3] / self._sums[0]).tolist()
        return max(y - self._slope * x, 0.0), self._slope


class StepSeconds:
    """Seconds of a step by its rows, of each size that was measured.

    share: what reading K and V of a token takes, as a part of what reading the model takes.

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
