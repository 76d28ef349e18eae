"""Drafts that an assistant makes: how many tokens are guessed is settled before they are."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ...planning.requests_and_prefixes import Request
from ...planning.step import Step
from ..device_loop.graph_sizes import draft_size_of, size_of
from .assistant import MOST_ANSWERS, MOST_GUESSED, Assistant
from .drafts import Drafts
from .drafts_ahead import DraftsAhead

_FASTER, _SLOWER = 0.5, 0.1  # how much the latest seconds of the assistant count
_FORGOTTEN = 0.03  # how much nearer to the first guess a burst, or a step, without guesses brings what is known
_GAIN = 1.03  # so many times as many tokens a second must be expected
_PROBED, _PROBE = 16, 3  # after so many steps without a guess, so many tokens are guessed all the same
_SURE = 12.0  # guesses that have been seen, before more than one answer gets any
_MOST_PROBED = 512  # twice as many steps later each time, up to so many
_BURSTS_WITHOUT = 4  # after a step for which there were no guesses
# Of a step's time, what a token of a prompt takes, where it has not been measured.
_READING, _READING_ON_A_CPU = 1 / 320, 1 / 10
_SAVED = 0.3  # of the time for an answer's other tokens, at most, is spent on what the assistant has to read before


class Assisted(Drafts, ABC):
    """What both loops have in common. ``ratio``: how large the assistant is, as a part of the model."""

    counts_as = "model"
    _tries = False  # the step with guesses is one to learn from: of a single answer

    def __init__(self, *given: Any, assistant: Assistant, ratio: float, **named: Any) -> None:
        super().__init__(*given, **named)
        self.assistant = assistant
        self._ratio = ratio
        self._for_token: float | None = None  # seconds that the assistant takes for a token of each answer
        self._share = 1.0  # of the answers that it guesses for: the others have no room in its cache, or too long texts

    def _guesses(self, requests: Sequence[Request]) -> dict[Request, list[int]]:
        count = self._count(requests)
        if not count:
            return {}
        asking = [request for request in requests if self._most_of(request) > 0 and self._may_read(request, requests)]
        if self._tries and asking:
            asking = [min(asking, key=self.assistant.unread)]
        guesses = self.assistant.guess(asking, count) if asking else {}
        if not self._tries:
            self._share += _FASTER * (len(guesses) / len(requests) - self._share)
        if guesses and self.assistant.is_steady:
            taken = self.assistant.seconds / count
            known = taken if self._for_token is None else self._for_token
            self._for_token = known + (_FASTER if taken < known else _SLOWER) * (taken - known)
        return {request: guess[: self._most_of(request)] for request, guess in guesses.items()}

    @abstractmethod
    def _count(self, requests: Sequence[Request]) -> int:
        """How many tokens of each answer are guessed; 0: none."""

    @abstractmethod
    def _reading(self, rows: int) -> float:
        """Seconds that the model itself would take for a token of a prompt, as a part of those of a step."""

    def _may_read(self, request: Request, requests: Sequence[Request]) -> bool:
        """Whether guesses can save more than it takes the assistant to read what it has not read of an answer."""
        rows = len(requests)
        left = (request.max_new_tokens - request.made) / rows  # steps' worth of time
        return self._ratio * self.assistant.unread(request) * self._reading(rows) <= _SAVED * left

    def _most_of(self, request: Request) -> int:
        if request.prompt_keys is not request.prompt_ids:  # the assistant does not see images
            return 0
        return min(self._most(request), request.max_new_tokens - request.made - 1)

    def _fastest(
        self, requests: Sequence[Request], seconds_of: Callable[[int], float], for_a_guess: float
    ) -> tuple[int, float]:
        """How many tokens to guess for the most tokens a second, and how many these are.

        seconds_of: a step with so many tokens. for_a_guess: seconds of the assistant, before it has been measured.
        """
        rows = len(requests)
        most = min(MOST_GUESSED, max(map(self._most_of, requests)), self._most_tokens // rows - 1)
        if rows > MOST_ANSWERS or most < 1 or self.assistant.has_ended:
            return 0, 0.0
        rate = sum(map(self._rate_of, requests)) / rows
        for_token = for_a_guess if self._for_token is None else self._for_token
        tokens, chance, best = 1.0, 1.0, (0, 0.0)
        for count in range(1, most + 1):
            chance *= rate
            tokens += self._share * chance
            run = rows + math.ceil(self._share * rows * count)
            speed = rows * tokens / (seconds_of(run) + count * for_token)
            if speed > best[1]:
                best = count, speed
        return best

    def _forget_some(self, first_guess: float) -> None:
        """What was measured of the assistant may have been an exception, and is not measured while it guesses nothing.

        first_guess: of its seconds for a token.
        """
        self._share += _FORGOTTEN * (1 - self._share)
        if self._for_token is not None:
            self._for_token += _FORGOTTEN * (first_guess - self._for_token)

    def _that_pay(self, rows: int, guesses: dict[Request, list[int]]) -> dict[Request, list[int]]:
        return guesses

    def _forget(self, request: Request) -> None:
        self.assistant.forget(request)


class AssistedDrafts(Assisted):
    """Where the host picks each token, and sees it before the next step."""

    _probed = _PROBED

    def _count(self, requests: Sequence[Request]) -> int:
        rows, line = len(requests), self._times.line()
        self._tries = line is None or self._of_all[1] < _SURE
        if line is None:  # so that it is known what they cost, beside a step without
            return 1 if self._times.any and rows <= MOST_ANSWERS and not self.assistant.has_ended else 0
        for_step, for_token = line

        def seconds_of(tokens: int) -> float:
            return for_step + for_token * tokens

        first_guess = self._ratio * seconds_of(rows)
        count, speed = self._fastest(requests, seconds_of, first_guess)
        if speed * seconds_of(rows) < _GAIN * rows:
            count = 0
        if count:
            self._without, self._probed = 0, _PROBED
            return count
        self._forget_some(first_guess)
        self._without += 1
        if self._without < self._probed or rows > MOST_ANSWERS:
            return 0
        self._without, self._probed, self._tries = 0, min(2 * self._probed, _MOST_PROBED), True
        return _PROBE

    def _reading(self, rows: int) -> float:
        line = self._times.line()
        if line is None:
            return _READING_ON_A_CPU
        for_step, for_token = line
        return for_token / (for_step + for_token * rows)


class AssistedAhead(Assisted, DraftsAhead):
    """On a GPU, where steps without drafts run ahead of the host."""

    def _guesses(self, requests: Sequence[Request]) -> dict[Request, list[int]]:
        began, self.assistant.seconds = time.perf_counter(), 0.0
        guesses = super()._guesses(requests)
        self._spent = self.assistant.seconds
        self.saved_seconds -= time.perf_counter() - began
        if not guesses:  # none pays, or there is no room in its cache
            self._waits = _BURSTS_WITHOUT
        return guesses

    def ran(self, step: Step, began: float, launched: float, gained: int, steady: bool) -> None:
        super().ran(step, began, launched, gained, steady and (self.assistant.is_steady or not step.in_rows))

    @property
    def _may_go_on(self) -> bool:
        return False

    def _count(self, requests: Sequence[Request]) -> int:
        rows, ahead = len(requests), self._seconds_of(size_of(len(requests)))
        count, speed = self._fastest(requests, self._seconds_with(rows), self._ratio * (ahead or 1.0))
        if ahead is not None and speed * ahead <= rows:
            return 0
        return count

    def _reading(self, rows: int) -> float:
        return _READING

    def _expected(self, requests: Sequence[Request], guesses: dict[Request, list[int]]) -> tuple[int, float]:
        going = [request for request in requests if not request.done]
        if not going:
            return 0, 0.0
        first_guess = self._ratio * (self._seconds_of(size_of(len(going))) or 1.0)
        self._forget_some(first_guess)
        count, speed = self._fastest(going, self._seconds_with(len(going)), first_guess)
        return len(going) * count, speed

    def _seconds_with(self, rows: int) -> Callable[[int], float]:
        def seconds(tokens: int) -> float:
            return (self._seconds_of(draft_size_of(tokens)) or 1.0) + self._expected_gap(rows)

        return seconds

    def before(self, step: Step) -> None:
        """How often the assistant is right is not known without trying."""

    def _learn(self, requests: Any) -> None:
        """It reads what it has not read when it guesses next."""
