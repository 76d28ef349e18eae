"""How long the rest of a call will take, from how long its steps took.

A step is taken to cost something by itself, something for each prompt token and something for each answer token that
it runs. The three costs are fitted to the steps so far. Where these cannot tell the costs apart, their usual ratios do.
"""

from __future__ import annotations

import math

import numpy as np
from torch import nn

# What a step costs by itself, and what an answer token costs, each in prompt tokens: a guess until steps have shown it.
# Reading the weights takes a GPU as long as computing some hundred tokens, and a CPU as long as a few dozen.
STEP_ON_GPU, STEP_ON_CPU, _ANSWER_TOKEN = 300.0, 32.0, 1.5
_MOST_FOR_HEAD = 4.0
_MEMORY = 1 - 1 / 128  # what a step counts for after the next one: answers grow, and machines get busy


class StepCosts:
    """Learns what steps, prompt tokens and answer tokens cost, in seconds. ``head``: as ``cost_of_head`` has it."""

    def __init__(self, on_gpu: bool = False, head: float = 1.0) -> None:
        self._usual = np.array([head * (STEP_ON_GPU if on_gpu else STEP_ON_CPU), 1.0, head * _ANSWER_TOKEN])
        self._usual_list: list[float] = self._usual.tolist()
        # Sums over steps, in units of the usual costs. Each step is weighted with what it should usually cost.
        self._pairs = [0.0] * 6  # of the upper triangle of the normal equations
        self._seconds = [0.0] * 3
        self._units = self._all_seconds = self._steps = 0.0
        self._only_first = False  # the sums hold the first step alone, which compiles and allocates: it is no measure
        self._costs: np.ndarray | None = None

    @property
    def known(self) -> bool:
        return self._steps > 0

    def learn(self, steps: int, prompt_tokens: int, answer_tokens: int, seconds: float) -> None:
        """Steps that ran one after the other, with all of their tokens."""
        usual = self._usual_list
        a, b, c = usual[0] * steps, usual[1] * prompt_tokens, usual[2] * answer_tokens
        units = a + b + c
        if units <= 0:
            return
        keep = 0.0 if self._only_first else _MEMORY
        self._only_first = not self.known
        new = a * a / units, a * b / units, a * c / units, b * b / units, b * c / units, c * c / units
        self._pairs = [keep * old + each for old, each in zip(self._pairs, new, strict=True)]
        self._seconds = [
            keep * old + each * seconds / units for old, each in zip(self._seconds, (a, b, c), strict=True)
        ]
        self._units = keep * self._units + units
        self._all_seconds = keep * self._all_seconds + seconds
        self._steps = keep * self._steps + 1
        self._costs = None

    def __call__(self, steps: float, prompt_tokens: float, answer_tokens: float) -> float:
        """The seconds that these will take."""
        if self._costs is None:
            self._costs = self._fitted() * self._usual
        step, prompt_token, answer_token = self._costs.tolist()
        return float(step * steps + prompt_token * prompt_tokens + answer_token * answer_tokens)

    def _fitted(self) -> np.ndarray:
        """The costs in units of the usual ones, none of them negative. One average step speaks for the usual ratios."""
        if not self.known:
            return np.zeros(3)
        a, b, c, d, e, f = self._pairs
        usual = self._all_seconds / self._units
        weight = (a + d + f) / self._steps
        matrix = np.array([[a, b, c], [b, d, e], [c, e, f]]) + weight * np.eye(3)
        right = np.array(self._seconds) + weight * usual
        used = [0, 1, 2]
        while True:
            found = np.zeros(3)
            found[used] = np.linalg.solve(matrix[np.ix_(used, used)], right[used])
            if found.min() >= 0:
                return found
            used.remove(int(found.argmin()))


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


def expected_tokens(limit: float, chance: float) -> float:
    """New tokens of an answer that may have ``limit`` more and ends with each of them by ``chance``."""
    if chance <= 0:
        return limit
    return -math.expm1(limit * math.log1p(-min(chance, 0.999))) / chance


def longest_of(answers: int, limit: float, chance: float) -> float:
    """New tokens of the longest of so many such answers."""
    if chance <= 0:
        return limit
    return min(limit, (math.log(max(answers, 1)) + 0.58) / chance)


def steps_left(
    prompt_tokens: float, longest: float, answer_tokens: float, tokens_of_prompts: float, rows: float
) -> float:
    """Steps that these take: prompts first and then the longest answer, or wave after wave where memory is short.

    tokens_of_prompts: that a step takes. rows: answers that run at the same time.
    """
    return max(prompt_tokens / max(tokens_of_prompts, 1) + longest, answer_tokens / max(rows, 1))


def usual_rows(sequences: int, pages: int, pages_at_once: int) -> float:
    """Sequences that run at the same time, as far as memory tells."""
    return max(1.0, sequences * min(1.0, pages / max(pages_at_once, 1)))
