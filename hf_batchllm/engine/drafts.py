"""Drafts: tokens that are guessed, and run beside the one that they would follow.

A guess counts where it is the token that its position draws anyway. The noise is a position's own, so answers are the
same as without drafts, and only their number of steps is smaller. K and V of wrong guesses are written over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from ..planning.requests_and_prefixes import Request
from ..planning.step import Chunk, Step
from ..sampling.earlier_answers import EarlierAnswers
from ..sampling.text_lookup import TextLookup

MOST_TOKENS = 64  # of a step that has drafts: where there are more rows, the next one costs nearly as much as the first
_FIRST_RATE = 0.7  # of guesses that are right, before any has been seen
_LATEST = 0.4  # how much the latest draft counts in a rate
_DRIFT = 0.02  # how much nearer to the rate of all answers a step without a draft brings that of one: texts change
_STEPS_IN_TIMES = 0.97  # how much what was measured of steps counts after another step
_GAIN = 1.03  # so many times as many tokens a second must be expected
_PROBED = 32  # steps of which no guess pays, after which a few tokens of one are run all the same
_PROBE = 3  # tokens


class Times:
    """Seconds of a step by its tokens: a line through what was measured, the latest of it above all."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of weights, tokens, seconds, tokens squared, tokens times seconds
        self._slope: float | None = None

    def note(self, tokens: int, seconds: float) -> None:
        self._sums = _STEPS_IN_TIMES * self._sums + [1, tokens, seconds, tokens * tokens, tokens * seconds]
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


class Drafts:
    """most: of a request, how many tokens may be guessed at a time; 0: none.
    longest: of a request, how many tokens are looked for, at most: what has followed them is the guess.
    lengthen: reserves pages of a request up to a position, and says up to which it has them.
    pick: the next tokens of requests, [requests, 1], from these rows of the logits of the latest step's drafts.
    most_tokens: of a step that has drafts.
    earlier: answers of earlier calls; those of this one are added.
    """

    def __init__(
        self,
        most: Callable[[Request], int],
        longest: Callable[[Request], int],
        requests: Sequence[Request],
        lengthen: Callable[[Request, int], int],
        pick: Callable[[Sequence[int], Sequence[Request]], np.ndarray],
        most_tokens: int = MOST_TOKENS,
        earlier: EarlierAnswers | None = None,
    ) -> None:
        self._earlier = EarlierAnswers() if earlier is None else earlier
        self._most_tokens = min(most_tokens, MOST_TOKENS)
        self._unfinished = Counter(request.index for request in requests)  # by prompt
        self._most = most
        self._longest = longest
        self.pick = pick
        self._lengthen = lengthen
        self._lookups: dict[int, TextLookup] = {}  # by prompt
        self._rate = _FIRST_RATE  # of all answers
        self._rates: dict[Request, float] = {}
        self._times = Times()
        self._without = 0  # steps since a draft has run
        self.drafted = self.accepted = 0  # tokens

    def added(self, step: Step) -> Step:
        """The step with drafts, where they pay: rows that have one are chunks there."""
        if step.chunks or step.times > 1 or not step.rows or len(step.rows) >= self._most_tokens:
            return step
        guesses = {request: guess for request in step.rows if (guess := self._guess(request))}
        drafts = self._that_pay(len(step.rows), guesses) if guesses else {}
        for request in guesses.keys() - drafts.keys():
            self._rates[request] = self._rate_of(request) + _DRIFT * (self._rate - self._rate_of(request))
        chunks = []
        for request, draft in drafts.items():
            end = self._lengthen(request, request.length + len(draft))
            if there := draft[: end - request.length]:
                chunks.append(Chunk(request, request.length - 1, request.length + len(there), tuple(there)))
        if not chunks:
            return step
        with_one = {chunk.unit for chunk in chunks}
        return Step([request for request in step.rows if request not in with_one], chunks, copies=step.copies)

    def _guess(self, request: Request) -> list[int]:
        most = min(self._most(request), request.max_new_tokens - request.made - 1)
        if most < 1 or request.prompt_keys is not request.prompt_ids:  # with images a guess may be at one of theirs
            return []
        if request.index not in self._lookups:
            earlier = [answer.tolist() for answer in self._earlier.of(request)]
            self._lookups[request.index] = TextLookup(request.prompt_ids.tolist(), self._longest(request), earlier)
        return self._lookups[request.index].guess(request.sample, request.generated, most)

    def _that_pay(self, rows: int, guesses: dict[Request, list[int]]) -> dict[Request, list[int]]:
        """Of each guess as many tokens as bring more than they cost."""
        room = self._most_tokens - rows
        line = self._times.line()
        if line is None:  # so that it is known what they cost, beside a step without
            return _first_of(guesses, dict.fromkeys(list(guesses)[:room], 1)) if self._times.any else {}
        for_step, for_token = line
        tokens, seconds = float(rows), for_step + for_token * rows
        # In the order of how likely each is to be right, and all before it.
        likely = sorted(
            (
                (self._rate_of(request) ** place, number, request)
                for number, (request, guess) in enumerate(guesses.items())
                for place in range(1, len(guess) + 1)
            ),
            key=lambda each: (-each[0], each[1]),
        )
        counts: Counter[Request] = Counter()
        for chance, _, request in likely[:room]:
            if chance * seconds < _GAIN * for_token * tokens:
                break
            counts[request] += 1
            tokens, seconds = tokens + chance, seconds + for_token
        self._without = 0 if counts else self._without + 1
        if self._without >= _PROBED:
            self._without = 0
            longest = max(guesses, key=lambda request: len(guesses[request]))
            counts[longest] = min(_PROBE, room)
        return _first_of(guesses, counts)

    def _rate_of(self, request: Request) -> float:
        return self._rates.get(request, self._rate)

    def ran(self, tokens: int, seconds: float) -> None:
        """A step of decode rows, and of drafts beside them, has taken so long."""
        self._times.note(tokens, seconds)

    def seen(self, chunk: Chunk, accepted: int) -> None:
        """So many tokens of a chunk's draft were right."""
        assert isinstance(chunk.unit, Request)
        # Of guesses up to the first wrong one: what stands behind it tells nothing.
        latest = accepted / min(len(chunk.draft), accepted + 1)
        self._rates[chunk.unit] = self._rate_of(chunk.unit) + _LATEST * (latest - self._rate_of(chunk.unit))
        self._rate += _LATEST / max(4, len(self._rates)) * (latest - self._rate)

    def too_large(self, step: Step) -> None:
        """It ran out of memory."""
        self._most_tokens = step.tokens // 2

    def finished(self, request: Request) -> None:
        self._rates.pop(request, None)
        if self._most(request):
            self._earlier.take(request)
        self._unfinished[request.index] -= 1
        if not self._unfinished[request.index]:
            self._lookups.pop(request.index, None)


def _first_of(guesses: dict[Request, list[int]], counts: dict[Request, int]) -> dict[Request, list[int]]:
    return {request: guesses[request][:count] for request, count in counts.items() if count > 0}
