"""A step: what one run of the model works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from .draft_room import DraftRoom
from .requests_and_prefixes import Branch, Request, Unit


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[begin, end)`` of a unit, to run in this step.

    ``draft``: the last of them, if these are guesses at tokens that the request has yet to get.
    """

    unit: Unit
    begin: int
    end: int
    draft: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether the model's output for the last token before the draft gives a request its next token."""
        return isinstance(self.unit, Request) and self.end - len(self.draft) == self.unit.length

    @property
    def of_prompt(self) -> bool:
        """Whether its tokens are those of a prompt or a prefix, or of an answer that is computed again."""
        return not self.draft and not (isinstance(self.unit, Branch) and self.unit.root is not self.unit)

    def ids(self) -> np.ndarray:
        known = self.unit.tokens(self.begin, self.end - len(self.draft))
        return np.append(known, np.array(self.draft, dtype=known.dtype)) if self.draft else known


@dataclass(slots=True)
class Step:
    """Decode rows of a token each, then chunks of prompts.

    Rows are in the order of the plan, so that all rows on a prefix are neighbours. Without chunks, the rows may run
    several times before the host sees their tokens: each run takes the token that the run before it gave.

    ``drafts``: of rows that tokens are guessed for, the last known token and the guesses, where each of these tokens is
    a row of its own. Elsewhere they are among ``chunks``, in place of their rows. ``room``: where these rows stand, if
    not one behind the other. ``instead``: gives the step to run where this one runs out of memory; None: its parts.
    """

    rows: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    times: int = 1  # how often the rows run; set by the engine. A row that may have no more tokens leaves earlier
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target) slots of states; made before it runs
    drafts: list[Chunk] = field(default_factory=list)
    room: DraftRoom | None = None
    instead: Callable[[], Step] | None = None
    _sampling: list[Request] | None = None

    @property
    def tokens(self) -> int:
        """How many tokens one run of the model takes."""
        guessed = sum(len(chunk.draft) for chunk in self.drafts)
        return len(self.rows) + sum(chunk.end - chunk.begin for chunk in self.chunks) + guessed

    @property
    def prompt_tokens(self) -> int:
        """Those of prompts and prefixes."""
        return sum(chunk.end - chunk.begin for chunk in self.chunks if chunk.of_prompt)

    @property
    def in_rows(self) -> bool:
        """Whether each guessed token is a row of its own. In a room there may be none in some steps."""
        return self.room is not None or bool(self.drafts)

    @property
    def is_drafted(self) -> bool:
        """Whether tokens that are guessed run in it, or could. Then all of its chunks are rows with such tokens."""
        return self.in_rows or any(chunk.draft for chunk in self.chunks)

    def times_of(self, request: Request) -> int:
        """How many tokens the step gives a request. Right only until the collector has been told of it."""
        return min(self.times, request.max_new_tokens - request.made)

    def sampling(self) -> list[Request]:
        """The requests that get a token, rows first.

        Remembered from the first call on: the engine changes the requests' lengths, and ``Chunk.samples`` with them.
        """
        if self._sampling is None:
            ends = [chunk.unit for chunk in self.chunks if chunk.samples]
            self._sampling = self.rows + [unit for unit in ends if isinstance(unit, Request)]
        return self._sampling

    def __iter__(self) -> Iterator[Chunk]:
        """Rows and chunks alike, as chunks."""
        for request in self.rows:
            yield Chunk(request, request.length - 1, request.length)
        yield from self.chunks
