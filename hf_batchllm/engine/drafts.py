"""Drafts: tokens that are guessed, and run beside the one that they would follow.

A guess counts where it is the token that its position draws anyway. The noise is a position's own, so answers are the
same as without drafts, and only their number of steps is smaller. K and V of wrong guesses are written over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..planning.requests_and_prefixes import Request
from ..planning.step import Chunk, Step
from ..sampling.text_lookup import TextLookup

# Of a step that has drafts. Where there are more rows, each costs nearly as much as a step's first one.
MOST_TOKENS = 64
_FIRST_RATE = 0.7  # of guesses that are right, before any has been seen
_MEMORY = 0.8  # how much the rate so far counts beside the latest draft
_FORGETS = 0.02  # how much nearer to the first rate each step without a draft brings it: texts change
_TRIED = 64  # steps after which what was measured of steps is measured again


@dataclass
class _Times:
    """Seconds of steps by their number of tokens, in powers of two."""

    _of: dict[int, float] = field(default_factory=dict)

    def note(self, tokens: int, seconds: float) -> None:
        kind = tokens.bit_length()
        self._of[kind] = seconds if kind not in self._of else 0.7 * self._of[kind] + 0.3 * seconds

    def of(self, tokens: int) -> float | None:
        return self._of.get(tokens.bit_length())

    def forget(self) -> None:
        self._of.clear()


class Drafts:
    """most: of a request, how many tokens may be guessed at a time; 0: none.
    lengths: of a request, the fewest and the most tokens that are looked for: what has followed them is the guess.
    lengthen: reserves pages of a request up to a position, and says up to which it has them.
    pick: the next tokens of requests, [requests, 1], from these rows of the logits of the latest step's drafts.
    most_tokens: of a step that has drafts.
    """

    def __init__(
        self,
        most: Callable[[Request], int],
        lengths: Callable[[Request], tuple[int, int]],
        requests: Sequence[Request],
        lengthen: Callable[[Request, int], int],
        pick: Callable[[Sequence[int], Sequence[Request]], np.ndarray],
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        self._most_tokens = min(most_tokens, MOST_TOKENS)
        self._unfinished = Counter(request.index for request in requests)  # by prompt
        self._most = most
        self._lengths = lengths
        self.pick = pick
        self._lengthen = lengthen
        self._lookups: dict[int, TextLookup] = {}  # by prompt
        self._rates: dict[Request, float] = {}
        self._times = _Times()
        self._steps = 0
        self.drafted = self.accepted = 0

    def added(self, step: Step) -> Step:
        """The step with drafts, where they pay: rows that have one are chunks there."""
        if step.chunks or step.times > 1 or not step.rows or len(step.rows) >= self._most_tokens:
            return step
        guesses = {request: guess for request in step.rows if (guess := self._guess(request))}
        guesses = self._that_pay(len(step.rows), guesses)
        for request in step.rows:
            if request not in guesses:
                rate = self._rates.get(request, _FIRST_RATE)
                self._rates[request] = rate + _FORGETS * (_FIRST_RATE - rate)
        chunks = []
        for request, guess in guesses.items():
            end = self._lengthen(request, request.length + len(guess))
            if draft := guess[: end - request.length]:
                chunks.append(Chunk(request, request.length - 1, request.length + len(draft), tuple(draft)))
        if not chunks:
            return step
        with_one = {chunk.unit for chunk in chunks}
        return Step([request for request in step.rows if request not in with_one], chunks, copies=step.copies)

    def _guess(self, request: Request) -> list[int]:
        most = min(self._most(request), request.max_new_tokens - request.made - 1)
        if most < 1 or request.prompt_keys is not request.prompt_ids:  # with images a guess may be at one of theirs
            return []
        if request.index not in self._lookups:
            self._lookups[request.index] = TextLookup(request.prompt_ids.tolist(), *self._lengths(request))
        return self._lookups[request.index].guess(request.sample, request.generated, most)

    def _that_pay(self, rows: int, guesses: dict[Request, list[int]]) -> dict[Request, list[int]]:
        """The guesses, or the first tokens of each, or none."""
        if not guesses:
            return {}
        self._steps += 1
        if self._steps % _TRIED == 0:
            self._times.forget()
        alone = self._times.of(rows)
        if alone is None and self._steps > 1:
            return {}  # such a step is measured first
        most = max(map(len, guesses.values()))
        best, best_rate = {}, 0.0 if alone is None else rows / alone
        while most:
            some = {request: guess[:most] for request, guess in guesses.items()}
            tokens = rows + sum(map(len, some.values()))
            if tokens <= self._most_tokens:
                seconds = self._times.of(tokens)
                if seconds is None or alone is None:
                    return some  # so that it is known
                gained = sum(self._expected(request, len(guess)) for request, guess in some.items())
                rate = (rows + gained) / seconds
                if rate > best_rate:
                    best, best_rate = some, rate
            most //= 2
        return best

    def _expected(self, request: Request, tokens: int) -> float:
        """How many of so many guesses are right in a row."""
        rate = self._rates.get(request, _FIRST_RATE)
        return float(tokens) if rate >= 1 else rate * (1 - rate**tokens) / (1 - rate)

    def ran(self, tokens: int, seconds: float) -> None:
        """A step of decode rows, and of drafts beside them, has taken so long."""
        self._times.note(tokens, seconds)

    def seen(self, chunk: Chunk, accepted: int) -> None:
        """So many tokens of a chunk's draft were right."""
        assert isinstance(chunk.unit, Request)
        self.drafted += len(chunk.draft)
        self.accepted += accepted
        # Of guesses up to the first wrong one: what stands behind it tells nothing.
        rate = accepted / min(len(chunk.draft), accepted + 1)
        if not chunk.unit.done:
            self._rates[chunk.unit] = _MEMORY * self._rates.get(chunk.unit, _FIRST_RATE) + (1 - _MEMORY) * rate

    def finished(self, request: Request) -> None:
        self._rates.pop(request, None)
        self._unfinished[request.index] -= 1
        if not self._unfinished[request.index]:
            self._lookups.pop(request.index, None)
