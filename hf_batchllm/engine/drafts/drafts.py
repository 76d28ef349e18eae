"""Drafts: tokens that are guessed, and run beside the one that they would follow.

A guess counts where it is the token that its position draws anyway. The noise is a position's own, so answers are the
same as without drafts, and only their number of steps is smaller. K and V of wrong guesses are written over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ...planning.requests_and_prefixes import Request
from ...planning.step import Chunk, Step
from ...sampling.text_lookup import EarlierAnswers, TextLookup
from ..cost import Times

_FIRST_RATE = 0.7  # of guesses that are right, before any has been seen
_KEPT, _KEPT_OF_ALL = 0.9, 0.98  # how much drafts before the latest count: of one answer, and of all
_OF_ALL = 4.0  # guesses: so much the rate of all answers counts in that of one
_KEPT_WITHOUT = 0.98  # how much drafts count after a step without one: texts change
_GAIN = 1.03  # so many times as many tokens a second must be expected
_PROBED = 32  # steps of which no guess pays, after which a few tokens of one are run all the same
_PROBE = 3  # tokens
_UNSEEN = 0.0, 0.0


class Drafts:
    """Drafts where the host picks each token, and sees it before the next step.

    most: of a request, how many tokens may be guessed at a time; 0: none.
    longest: of a request, how many tokens are looked for, at most: what has followed them is the guess.
    lengthen: reserves pages of a request up to a position, and says up to which it has them.
    most_tokens: of a step that has drafts.
    earlier: answers of earlier calls; those of this one are added.
    """

    largest_step = 64  # tokens, with drafts: where there are more rows, the next costs nearly as much as the first
    must_know = False  # whether all tokens must be known before the next step
    counts_as = "scheduling"  # what the time is called in which guesses are made
    learns_beside = False  # whether answers so far are learned from while a step runs

    def __init__(
        self,
        most: Callable[[Request], int],
        longest: Callable[[Request], int],
        requests: Sequence[Request],
        lengthen: Callable[[Request, int], int],
        most_tokens: int,
        earlier: EarlierAnswers | None = None,
    ) -> None:
        self._earlier = EarlierAnswers() if earlier is None else earlier
        self._most_tokens = min(most_tokens, self.largest_step)
        self._unfinished = Counter(request.index for request in requests)  # by prompt
        self._most = most
        self._longest = longest
        self._lengthen = lengthen
        self._lookups: dict[int, TextLookup] = {}  # by prompt
        self._of_all = 4 * _FIRST_RATE, 4.0  # guesses that were right, and all up to the first wrong one
        self._of_each: dict[Request, tuple[float, float]] = {}
        self._times = Times()
        self._without = 0  # steps since a draft has run
        self.drafted = self.accepted = 0  # tokens
        self.saved_seconds = 0.0  # about so many: less than none where guesses cost more than they bring

    def added(self, step: Step) -> Step:
        """The step with drafts, where they pay: rows that have one are chunks there."""
        began = time.perf_counter()
        drafted = self._drafted(step)
        self.saved_seconds -= time.perf_counter() - began
        return drafted

    def _drafted(self, step: Step) -> Step:
        if step.chunks or step.times > 1 or not step.rows or len(step.rows) >= self._most_tokens:
            return step
        guesses = self._guesses(step.rows)
        drafts = self._that_pay(len(step.rows), guesses) if guesses else {}
        for request in guesses.keys() - drafts.keys():
            if request in self._of_each:
                right, tried = self._of_each[request]
                self._of_each[request] = _KEPT_WITHOUT * right, _KEPT_WITHOUT * tried
        return self._with(step, drafts) if drafts else step

    def _chunks(self, drafts: dict[Request, list[int]]) -> list[Chunk]:
        """Each draft as a chunk, cut off where pages run out."""
        chunks = []
        for request, draft in drafts.items():
            end = self._lengthen(request, request.length + len(draft))
            if there := draft[: max(0, end - request.length)]:
                chunks.append(draft_of(request, there))
        return chunks

    def _with(self, step: Step, drafts: dict[Request, list[int]]) -> Step:
        chunks = self._chunks(drafts)
        if not chunks:
            return step
        with_one = {chunk.unit for chunk in chunks}
        return Step([request for request in step.rows if request not in with_one], chunks, copies=step.copies)

    def before(self, step: Step) -> None:
        """The tokens of a step without drafts are about to be seen."""

    def _guesses(self, requests: Sequence[Request]) -> dict[Request, list[int]]:
        if not self.learns_beside:
            self._learn(requests)
        return {request: guess for request in requests if (guess := self._guess(request))}

    def _learn(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if (lookup := self._lookup(request)) is not None:
                lookup.learn(request.sample, request.generated)

    def _guess(self, request: Request) -> list[int]:
        lookup, most = self._lookup(request), min(self._most(request), request.max_new_tokens - request.made - 1)
        return [] if lookup is None or most < 1 else lookup.guess(request.sample, request.generated, most)

    def _lookup(self, request: Request) -> TextLookup | None:
        """None where no token may be guessed."""
        lookup = self._lookups.get(request.index)
        if lookup is None:
            # With images a guess may be at one of theirs.
            if request.prompt_keys is not request.prompt_ids or not self._most(request):
                return None
            earlier = [answer.tolist() for answer in self._earlier.of(request)]
            lookup = TextLookup(request.prompt_ids.tolist(), self._longest(request), earlier)
            self._lookups[request.index] = lookup
        return lookup

    def _that_pay(self, rows: int, guesses: dict[Request, list[int]]) -> dict[Request, list[int]]:
        """The tokens of each guess that bring more than they cost."""
        room = self._most_tokens - rows
        line = self._times.line()
        if line is None:  # so that it is known what they cost, beside a step without
            return first_of(guesses, dict.fromkeys(list(guesses)[:room], 1)) if self._times.any else {}
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
        return first_of(guesses, counts)

    @property
    def _rate(self) -> float:
        """How many guesses are right, of all requests."""
        return self._of_all[0] / self._of_all[1]

    def _rate_of(self, request: Request) -> float:
        of_all = self._rate
        right, tried = self._of_each.get(request, _UNSEEN)
        return (right + _OF_ALL * of_all) / (tried + _OF_ALL)

    def launched(self, step: Step) -> None:
        """A step has been launched. Where a device is at work on it, the host has time."""

    def ran(self, step: Step, began: float, launched: float, gained: int, steady: bool) -> None:
        """A step's tokens have been seen.

        began, launched: when the host began with it, and had launched it, by the clock of time.perf_counter.
        gained: tokens of a step that runs once. steady: whether others take as long.
        """
        if steady and (step.is_drafted or not step.chunks):
            seconds = time.perf_counter() - began
            self._times.note(step.tokens, seconds)
            if step.is_drafted and (line := self._times.line()) is not None:
                answers = len(step.rows) + len(step.chunks)
                without = line[0] + line[1] * answers
                self.saved_seconds += without * (gained + len(step.chunks)) / answers - seconds

    def seen(self, request: Request, guessed: int, accepted: int) -> None:
        """So many of the tokens that were guessed for a request were right."""
        tried = min(guessed, accepted + 1)  # what stands behind a wrong one tells nothing
        if not request.done:
            self._of_each[request] = _counted(_KEPT, self._of_each.get(request, _UNSEEN), accepted, tried)
        self._of_all = _counted(_KEPT_OF_ALL, self._of_all, accepted, tried)

    def too_large(self, step: Step) -> None:
        """It ran out of memory."""
        self._most_tokens = (step.tokens if step.room is None else step.room.size) // 2

    def finished(self, request: Request) -> None:
        self._of_each.pop(request, None)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        if self._most(request):
            self._earlier.take(request)
        self._unfinished[request.index] -= 1
        if not self._unfinished[request.index]:
            self._lookups.pop(request.index, None)


def draft_of(request: Request, guess: Sequence[int]) -> Chunk:
    return Chunk(request, request.length - 1, request.length + len(guess), tuple(guess))


def first_of(guesses: dict[Request, list[int]], counts: dict[Request, int]) -> dict[Request, list[int]]:
    return {request: guesses[request][:count] for request, count in counts.items() if count > 0}


def _counted(kept: float, before: tuple[float, float], right: int, tried: int) -> tuple[float, float]:
    return kept * before[0] + right, kept * before[1] + tried
