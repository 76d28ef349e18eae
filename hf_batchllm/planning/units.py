"""What is on its way through the engine: shared prefixes, requests, and the step that they make up.

A *unit* is a run of tokens with pages of its own. A shared prefix is one; a request is one. A unit stands on a
``base``: the prefix that holds everything before its ``start``, which may reach further than the unit reads of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np


class Unit(ABC):
    """Tokens ``[start, ...)`` of one sequence, the pages that hold their K and V, and what comes before them."""

    __slots__ = ("base", "computed", "key", "lost", "pages", "refs", "start", "wanted")

    def __init__(self, start: int, key: Hashable) -> None:
        self.start = start
        self.base: Unit | None = None  # set by the cache, which counts who stands on whom
        self.key = key
        self.computed = start  # set by the scheduler: K and V before this position are there, or in the step just made
        self.lost = start  # set by the cache: they were there once, and have been given up
        self.pages: list[int] = []  # set by the cache
        self.refs = 0  # set by the cache: units that stand directly on this one
        self.wanted = start  # set by the cache: how far the units that stand on it read

    @property
    def readable(self) -> int:
        """The position up to which others may stand on it."""
        return self.start

    def ancestors(self) -> list[tuple[Unit, int]]:
        """The units below this one, outermost first, each with the position up to which it is read."""
        chain: list[tuple[Unit, int]] = []
        child: Unit = self
        while child.base is not None:
            chain.append((child.base, child.start))
            child = child.base
        chain.reverse()
        return chain

    @abstractmethod
    def tokens(self, begin: int, end: int) -> np.ndarray:
        """The ids at positions ``[begin, end)``."""


class Prefix(Unit):
    """Tokens that several units stand on, computed once."""

    __slots__ = ("end", "ids", "kept", "running")

    def __init__(self, ids: np.ndarray, start: int, end: int, key: Hashable = None) -> None:
        assert 0 <= start <= end <= len(ids)
        super().__init__(start, key)
        self.ids = ids  # the whole sequence from position 0; ids[start:end] is what this unit holds
        self.end = end
        self.running = 0  # set by the scheduler: running requests anywhere above
        self.kept = False  # set by the cache: stays for the next call

    @property
    def readable(self) -> int:
        return self.end

    def tokens(self, begin: int, end: int) -> np.ndarray:
        assert self.start <= begin <= end <= self.end
        return self.ids[begin:end]

    def __repr__(self) -> str:
        return f"Prefix([{self.start}:{self.end}], computed={self.computed}, refs={self.refs}, pages={len(self.pages)})"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TIME = "time"
    ERROR = "error"


class Request(Unit):
    """One sequence to generate: a prompt, what it has produced, and how long it may become."""

    __slots__ = (
        "can_stop",
        "finish_reason",
        "generated",
        "index",
        "max_new_tokens",
        "pending",
        "prompt_ids",
        "rank",
        "sample",
        "score",
        "seat",
    )

    def __init__(
        self,
        index: int,
        prompt_ids: np.ndarray,
        max_new_tokens: int,
        *,
        sample: int = 0,
        rank: int = 0,
        start: int = 0,
        key: Hashable = None,
        can_stop: bool = True,
    ) -> None:
        assert 0 <= start < len(prompt_ids), "a request owns at least its last prompt token"
        assert max_new_tokens > 0
        super().__init__(start, key)
        self.index = index  # the prompt's place in the list
        self.sample = sample  # which of its num_return_sequences
        self.rank = rank  # place in the order of the plan; the lowest unfinished rank is never preempted
        self.prompt_ids = prompt_ids
        self.max_new_tokens = max_new_tokens
        self.can_stop = can_stop  # before it is as long as it may become
        self.generated: list[int] = []
        self.pending = 0  # set by the engine: tokens sampled on the device that nobody here has seen yet
        self.seat = 0  # set by the engine: where the device keeps its last token
        self.finish_reason: FinishReason | None = None
        self.score: float | None = None  # of a beam search's answer

    @property
    def length(self) -> int:
        """All tokens that there are, seen or not."""
        return len(self.prompt_ids) + len(self.generated) + self.pending

    @property
    def made(self) -> int:
        """New tokens, seen or not."""
        return len(self.generated) + self.pending

    @property
    def exhausted(self) -> bool:
        """Whether no further token may be sampled, though the last ones may not have been seen."""
        return self.made >= self.max_new_tokens

    @property
    def max_length(self) -> int:
        """Positions that ever need K and V: the last token is sampled and never run."""
        return len(self.prompt_ids) + self.max_new_tokens - 1

    def most_pages(self, page_size: int) -> int:
        """Pages of its own that it needs at the most."""
        return -(-(self.max_length - self.start) // page_size)

    @property
    def todo(self) -> int:
        """Own tokens to run before the next one can be sampled."""
        return self.length - self.computed

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def expect(self, tokens: int = 1) -> None:
        """So many tokens are being sampled, and will be seen later."""
        assert not self.done and tokens > 0
        assert self.computed == self.length + tokens - 1, "a token is sampled before its prompt is computed"
        self.pending += tokens
        assert self.made <= self.max_new_tokens

    def append(self, token: int, is_stop: bool) -> None:
        """Take a sampled token and notice the end."""
        self.extend([token], FinishReason.STOP if is_stop else None)

    def extend(self, tokens: list[int], reason: FinishReason | None) -> None:
        """Take tokens that were sampled one after the other; ``reason``: why the last of them ends the answer."""
        assert not self.done and tokens
        if self.pending:
            assert self.pending >= len(tokens)
            self.pending -= len(tokens)
        else:
            assert len(tokens) == 1 and self.computed == self.length, "a token was sampled before its prompt"
        self.generated += tokens
        if reason:
            self.end(reason)
        elif len(self.generated) >= self.max_new_tokens:
            self.end(FinishReason.LENGTH)

    def end(self, reason: FinishReason) -> None:
        """With the tokens that have been seen."""
        assert not self.done
        self.finish_reason = reason
        self.pending = 0  # whatever has been sampled since is not part of the answer

    def tokens(self, begin: int, end: int) -> np.ndarray:
        """Tokens at positions ``[begin, end)``: of the prompt, then of what was generated; 0 where nobody knows yet."""
        assert 0 <= begin <= end <= self.length
        prompt = len(self.prompt_ids)
        if end <= prompt:
            return self.prompt_ids[begin:end]
        first = max(begin - prompt, 0)
        new = np.zeros(end - prompt - first, dtype=np.int32)
        seen = self.generated[first : end - prompt]
        new[: len(seen)] = seen
        return new if begin >= prompt else np.concatenate([self.prompt_ids[begin:], new])

    def __repr__(self) -> str:
        state = self.finish_reason.value if self.finish_reason else f"computed={self.computed}/{self.length}"
        return f"Request({self.index}.{self.sample}, start={self.start}, {state}, pages={len(self.pages)})"


class Branch(Request):
    """One way to go on from a prompt, of several; others may stand on it, each up to where it parted from it.

    ``generated`` holds all new tokens, those below ``start`` included.
    """

    __slots__ = ("held", "root", "width")

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.held = True  # somebody goes on from it; else it stays as far, and as long, as others stand on it
        self.width = 0  # of the prompt itself: how many ways are followed at a time
        self.root: Branch = self  # the prompt itself

    def fork(self, tokens: list[int], start: int) -> Branch:
        """Another one of the same prompt, with these new tokens, that reads this one up to ``start``."""
        branch = Branch(
            self.index, self.prompt_ids, self.max_new_tokens, rank=self.rank, key=self.key, can_stop=self.can_stop
        )
        branch.start = branch.computed = branch.lost = branch.wanted = start
        branch.generated = tokens
        branch.root = self.root
        return branch

    @property
    def readable(self) -> int:
        return self.length

    def most_pages(self, page_size: int) -> int:
        """Each way in pages of its own: so a search goes on when its pages are spent, however they lay before."""
        prompt, new = len(self.prompt_ids) - self.start, self.max_new_tokens - 1
        return -(-prompt // page_size) + self.width * -(-new // page_size)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[begin, end)`` of a unit, to run in this step."""

    unit: Unit
    begin: int
    end: int

    @property
    def samples(self) -> bool:
        """Whether the model's output for the last token of the chunk is a request's next token."""
        return isinstance(self.unit, Request) and self.end == self.unit.length


@dataclass(slots=True)
class Step:
    """What one run of the model works on: decode rows of a token each, then chunks of prompts.

    Rows are in the order of the plan, so that all rows below a prefix are neighbours. Without chunks, the rows may run
    several times before anybody looks: each time with the token that it was given the time before.
    """

    rows: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    times: int = 1  # set by the engine; a row that may have no more tokens leaves earlier
    _sampling: list[Request] | None = None

    @property
    def tokens(self) -> int:
        """How many the model runs over at a time."""
        return len(self.rows) + sum(chunk.end - chunk.begin for chunk in self.chunks)

    def times_of(self, request: Request) -> int:
        """How many tokens the step gives a request. To be asked before the engine expects them."""
        return min(self.times, request.max_new_tokens - request.made)

    def sampling(self) -> list[Request]:
        """The requests that get a token, rows first. Found out once: it changes whether a chunk is the last one."""
        if self._sampling is None:
            self._sampling = self.rows + [chunk.unit for chunk in self.chunks if chunk.samples]  # type: ignore[misc]
        return self._sampling

    def __iter__(self) -> Iterator[Chunk]:
        """Rows and chunks alike, as chunks."""
        for request in self.rows:
            yield Chunk(request, request.length - 1, request.length)
        yield from self.chunks


def units_below(units: Sequence[Unit]) -> list[Unit]:
    """``units`` and every prefix that they stand on, each once, a base before what stands on it."""
    seen: dict[Unit, None] = {}
    for unit in units:
        path: list[Unit] = []
        walk: Unit | None = unit
        while walk is not None and walk not in seen:
            path.append(walk)
            walk = walk.base
        for found in reversed(path):
            seen[found] = None
    return list(seen)
