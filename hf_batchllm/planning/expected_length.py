"""How long an answer is expected to become: a single number, for schedulers without a forecast over time."""

from __future__ import annotations

import math

from .requests_and_prefixes import Request


class ExpectedLength:
    """The mean length of the answers that have ended, and its spread."""

    _ENOUGH_ANSWERS = 8  # with fewer, neither is trusted

    def __init__(self) -> None:
        self.count, self._mean, self._squares = 0, 0.0, 0.0

    def learn(self, new_tokens: int) -> None:
        self.count += 1
        delta = new_tokens - self._mean
        self._mean += delta / self.count
        self._squares += delta * (new_tokens - self._mean)

    def of(self, request: Request) -> int:
        """How many new tokens to expect of a request that has not ended, its present ones included."""
        if not request.can_stop:
            return request.max_new_tokens
        if self.count < self._ENOUGH_ANSWERS:
            guess = request.max_new_tokens / 2  # between stopping at once and running to the limit
        else:
            # The first to end are the short ones, so the mean alone would be too low.
            guess = self._mean + math.sqrt(self._squares / self.count)
        return min(request.max_new_tokens, max(math.ceil(guess), request.made + 1))
