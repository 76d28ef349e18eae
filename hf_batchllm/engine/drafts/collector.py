"""What comes of the steps of a call that guesses tokens: those that count, and what is learned of guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...model.device_memory import is_out_of_memory
from ...planning.requests_and_prefixes import Request
from ...planning.step import Chunk, Step
from ..at_once import AtOnce
from ..collector import TokenCollector
from ..loop import InFlightStep
from .drafts import Drafts


class DraftCollector(TokenCollector):
    """``by_host``: what picks the tokens of drafts, where the host does."""

    def __init__(self, drafts: Drafts, by_host: AtOnce | None, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.drafts = drafts
        self.by_host = by_host

    @property
    def decoded(self) -> int:
        return super().decoded + self.drafts.drafted - self.drafts.accepted

    @property
    def drafted(self) -> tuple[int, int, float]:
        return self.drafts.drafted, self.drafts.accepted, self.drafts.saved_seconds

    def launched(self, step: Step, counts: Sequence[int]) -> None:
        super().launched(step, counts)
        if step.is_drafted:
            self.drafts.drafted += step.tokens - len(counts)
        self.drafts.launched(step)

    def collect(self, running: InFlightStep, tokens: np.ndarray) -> tuple[list[Request], int]:
        step, before = running.step, self.drafts.accepted
        if step.in_rows:
            finished, new_tokens = self._of_rows(running, tokens)
        else:
            self.drafts.before(step)
            finished, new_tokens = super().collect(running, tokens)
            new_tokens += self._picked_one_by_one(running, finished)
        gained = len(step.rows) + self.drafts.accepted - before
        self.drafts.ran(step, running.began, running.launched, gained, running.steady)
        return finished, new_tokens

    def _of_rows(self, running: InFlightStep, tokens: np.ndarray) -> tuple[list[Request], int]:
        """``tokens`` [samples, most]: the device has drawn one in each row, and those that count are not negative."""
        sampling = running.step.sampling()
        counts = np.maximum((tokens >= 0).sum(axis=1), 1).tolist()
        for request, count in zip(sampling, counts, strict=True):
            if count > 1:
                request.computed += count - 1
                request.expect(count - 1)
        count_of = dict(zip(sampling, counts, strict=True))
        for chunk in running.step.drafts:
            assert isinstance(chunk.unit, Request)
            self.drafts.seen(chunk.unit, len(chunk.draft), count_of[chunk.unit] - 1)
        idle = self.idle_tokens
        several = Step(running.step.rows, times=tokens.shape[1])
        finished, new_tokens = super().collect(replace(running, step=several, counts=counts), tokens)
        self.idle_tokens = idle  # right guesses behind an answer's end count as wrong ones
        self.drafts.accepted += new_tokens - len(sampling)
        return finished, new_tokens

    def _picked_one_by_one(self, running: InFlightStep, finished: list[Request]) -> int:
        """Go on with requests whose guesses are right, as if each had been a step. Gives how many tokens they get.

        ``finished``: those that the step itself has ended; the others that end are added.
        """
        first: dict[Chunk, int] = {}  # the row of each draft's first token
        rows = 0
        for chunk in running.step.chunks:
            if chunk.draft:
                first[chunk] = rows
                rows += len(chunk.draft)
        if not first:
            return 0
        assert self.by_host is not None
        right = dict.fromkeys(first, 0)
        going, place, new_tokens = list(first), 0, 0
        while going := [chunk for chunk in going if _is_right(chunk, place)]:
            requests = [chunk.unit for chunk in going if isinstance(chunk.unit, Request)]
            self.timekeeper.switch("tokens")
            try:
                tokens = self.by_host.pick_drafted([first[chunk] + place for chunk in going], requests)
            except Exception as error:
                if is_out_of_memory(error) and self.by_host.may_repeat(requests):
                    break  # these tokens are run again
                raise
            for request in requests:
                request.computed += 1
                request.expect()
            once_more = replace(running, step=Step(requests), counts=[1] * len(requests))
            ended, count = super().collect(once_more, tokens)
            finished += ended
            new_tokens += count
            self.drafts.accepted += len(going)
            for chunk in going:
                right[chunk] += 1
            place += 1
        for chunk, accepted in right.items():
            assert isinstance(chunk.unit, Request)
            self.drafts.seen(chunk.unit, len(chunk.draft), accepted)
        return new_tokens


def _is_right(chunk: Chunk, place: int) -> bool:
    """Whether the token at this place of a draft is the one that its request has got there, and its latest."""
    request, drawn_at = chunk.unit, chunk.end - len(chunk.draft) + place
    assert isinstance(request, Request)
    return (
        place < len(chunk.draft)
        and not request.done
        and request.length == drawn_at + 1
        and request.generated[-1] == chunk.draft[place]
    )
