"""Units: runs of tokens with pages of their own. Shared prefixes, requests and the beams of a search are units.

A unit stands on its ``base``, the unit that holds everything before its ``start``. The base may hold more than that:
the unit reads it only up to ``start``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from ..inputs.images.prompt_images import PromptPlaces

NO_SLOT = -1


class Unit:
    """Tokens ``[start, ...)`` of one sequence, and the pages that hold their K and V."""

    __slots__ = (
        "base", "computed", "copied", "key", "lost_end", "pages", "places", "read_end", "refs", "slot", "start",
        "two_way",
    )  # fmt: skip

    def __init__(
        self, start: int, key: Hashable, places: PromptPlaces | None = None, two_way: np.ndarray | None = None
    ) -> None:
        # The position of the first own token. Set when the unit is made, and moved on where a kept prefix holds more.
        self.start = start
        # The unit that holds the tokens before `start`; None if there are none. Set by the cache.
        self.base: Unit | None = None
        # Only units with equal keys share K and V: the name of the adapter, say. Set when the unit is made.
        self.key = key
        # Where tokens stand for RoPE, if images make that differ from their position. Set when the unit is made.
        self.places = places
        # int64 [runs, 2]  runs of the sequence whose tokens see all of the run: images, in some models. No chunk ends
        # inside of one. Set when the unit is made.
        self.two_way = two_way
        # So many tokens from `start` on are copied from the units below, whose last page ends in between. Set when the
        # requests of a call are lined up, where units begin at pages.
        self.copied = 0
        # K and V before this position are in the pages, or will be after the steps made so far. Set by the scheduler.
        self.computed = start
        # K and V before this position have been in the pages once; those from `computed` on are lost. Set by the cache.
        self.lost_end = start
        # The pages of the own tokens, in their order. Set by the cache.
        self.pages: list[int] = []
        # Where layers that carry a state keep that of the last computed token. Set by the cache, with the first page.
        self.slot = NO_SLOT
        # How many units have this one as their base. Set by the cache.
        self.refs = 0
        # The furthest `start` of these units: this one is read no further. Set by the cache.
        self.read_end = start

    @property
    def readable_end(self) -> int:
        """The furthest position at which a unit that stands on this one may start."""
        return self.start

    @property
    def first_computed(self) -> int:
        """The position of the first token that is not copied."""
        return self.start + self.copied

    def begins_with(self, copied: int) -> None:
        """So many tokens are copied. Nothing has been computed so far."""
        self.copied = copied
        self.computed = self.lost_end = self.start + copied

    @property
    def state_source(self) -> Unit | None:
        """The unit whose last token stands before this one's first. Units that hold nothing are passed over."""
        below = self.base
        while below is not None and below.start == self.start:
            below = below.base
        return below

    def ancestors(self) -> list[tuple[Unit, int]]:
        """The units below this one, the one at the beginning first, each with the position up to which it is read.

        Or copied.
        """
        chain: list[tuple[Unit, int]] = []
        child: Unit = self
        while child.base is not None:
            chain.append((child.base, child.first_computed))
            child = child.base
        chain.reverse()
        return chain

    def stands_on_computed(self) -> bool:
        """Whether all that this unit reads of those below it has been computed."""
        unit: Unit = self
        while unit.base is not None:
            if unit.base.computed < unit.first_computed:
                return False
            unit = unit.base
        return True

    def chunk_end(self, begin: int, end: int) -> int:
        """The furthest position up to ``end`` at which a chunk from ``begin`` may end; ``begin`` if there is none."""
        run = self._run_at(end)
        return end if run is None else max(begin, run[0])

    def shortest_chunk_end(self, begin: int) -> int:
        """The first position at which a chunk from ``begin`` may end."""
        run = self._run_at(begin + 1)
        return begin + 1 if run is None else run[1]

    def has_two_way(self, begin: int, end: int) -> bool:
        """Whether some of the tokens at positions ``[begin, end)`` see further than to themselves."""
        runs = self.two_way
        return runs is not None and bool(((runs[:, 0] < end) & (runs[:, 1] > begin)).any())

    def _run_at(self, end: int) -> tuple[int, int] | None:
        """The run that a chunk up to ``end`` would cut."""
        if self.two_way is None:
            return None
        at = int(np.searchsorted(self.two_way[:, 1], end, side="right"))  # the first that ends behind it
        if at == len(self.two_way) or self.two_way[at, 0] >= end:
            return None
        first, last = self.two_way[at].tolist()
        return first, last

    def prefixes(self) -> list[tuple[Prefix, int]]:
        """The ancestors that are shared prefixes. Of a request that is no beam, these are all ancestors."""
        return [(unit, end) for unit, end in self.ancestors() if isinstance(unit, Prefix)]

    def tokens(self, begin: int, end: int) -> np.ndarray:
        """The ids at positions ``[begin, end)``, in images those of ``Prompt.keys``."""
        raise NotImplementedError  # an abstract class would make each `isinstance` three times as slow


class Prefix(Unit):
    """Tokens that several prompts begin with, computed once."""

    __slots__ = ("end", "ids", "kept", "running")

    def __init__(
        self,
        ids: np.ndarray,
        start: int,
        end: int,
        key: Hashable = None,
        places: PromptPlaces | None = None,
        two_way: np.ndarray | None = None,
    ) -> None:
        assert 0 <= start <= end <= len(ids)
        super().__init__(start, key, places, two_way)
        # The sequence from position 0 on, at least up to `end`, as ``Prompt.keys``. Set when the prefix is made.
        self.ids = ids
        # The position after the last own token. Set when the prefix is made; the cache may cut it to `read_end`.
        self.end = end
        # How many running requests stand on it, directly or on prefixes in between. Set by the scheduler.
        self.running = 0
        # Whether it stays in the cache for the next call. Set by the cache.
        self.kept = False

    @property
    def readable_end(self) -> int:
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
    WITHDRAWN = "withdrawn"  # another process runs it: nothing is made of it here


class Request(Unit):
    """One sequence to generate: a prompt, its new tokens so far, and how long it may become."""

    __slots__ = (
        "can_stop",
        "finish_reason",
        "generated",
        "index",
        "max_new_tokens",
        "pending",
        "prompt_ids",
        "prompt_keys",
        "prompt_tokens",
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
        keys: np.ndarray | None = None,
        places: PromptPlaces | None = None,
        two_way: np.ndarray | None = None,
    ) -> None:
        assert 0 <= start < len(prompt_ids), "a request owns at least its last prompt token"
        assert max_new_tokens > 0
        super().__init__(start, key, places, two_way)
        # These nine are set when the request is made.
        self.index = index  # the prompt's place in the list
        self.sample = sample  # which of the prompt's num_return_sequences
        self.rank = rank  # place in the order of the plan
        self.prompt_ids = prompt_ids  # int32 [tokens]
        self.prompt_keys = prompt_ids if keys is None else keys  # int32 [tokens]  as ``Prompt.keys``
        self.prompt_tokens = len(prompt_ids)  # asked several times for each token of a call
        self.max_new_tokens = max_new_tokens  # after so many new tokens it has ended
        self.can_stop = can_stop  # whether anything else may end it before that: a stop token, a string, a criterion
        # New tokens that the host has seen. Set by the engine.
        self.generated: list[int] = []
        # How many more tokens steps on their way give, which the host has not seen yet. Set by the engine.
        self.pending = 0
        # The place at which the device keeps the last token. Set when the call begins.
        self.seat = 0
        # Why it has ended; None while it has not. Set by the engine.
        self.finish_reason: FinishReason | None = None
        # The score of a beam search's answer. Set by the beam engine.
        self.score: float | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt and new ones, seen by the host or not."""
        return self.prompt_tokens + len(self.generated) + self.pending

    @property
    def seen(self) -> int:
        """Tokens of the prompt, and new ones that the host has seen."""
        return self.prompt_tokens + len(self.generated)

    @property
    def made(self) -> int:
        """New tokens, seen by the host or not."""
        return len(self.generated) + self.pending

    @property
    def exhausted(self) -> bool:
        """Whether no further token may be sampled; the host may not have seen the last ones yet."""
        return self.made >= self.max_new_tokens

    @property
    def max_length(self) -> int:
        """How many positions need K and V in the end: the last token is sampled and never run."""
        return self.prompt_tokens + self.max_new_tokens - 1

    def most_pages(self, page_size: int) -> int:
        """The most pages of its own that it may need."""
        return -(-(self.max_length - self.start) // page_size)

    @property
    def todo(self) -> int:
        """Own tokens to run before the next one can be sampled."""
        return self.length - self.computed

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def expect(self, tokens: int = 1) -> None:
        """A step has been launched that samples so many tokens; the host sees them later."""
        made = len(self.generated) + self.pending + tokens  # plain sums here and below: each token of a call comes by
        assert self.finish_reason is None and tokens > 0
        assert self.computed == self.prompt_tokens + made - 1, "a token is sampled before its prompt is computed"
        assert made <= self.max_new_tokens
        self.pending += tokens

    def take(self, token: int, reason: FinishReason | None = None) -> None:
        """Take a sampled token; ``reason``: why it ends the answer, if it does. As ``extend``, without lists."""
        assert self.finish_reason is None
        if self.pending:
            self.pending -= 1
        else:
            assert self.computed == self.length, "a token was sampled before its prompt"
        self.generated.append(token)
        if reason:
            self.end(reason)
        elif len(self.generated) >= self.max_new_tokens:
            self.end(FinishReason.LENGTH)

    def extend(self, tokens: list[int], reason: FinishReason | None) -> None:
        """Take tokens sampled one after the other; ``reason``: why the last of them ends the answer, if it does."""
        assert self.finish_reason is None and tokens
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

    def jump(self, tokens: list[int]) -> None:
        """Take tokens that must come next. They have not been run, nor sampled: they are computed as a prompt's are."""
        assert self.finish_reason is None and not self.pending
        self.generated += tokens
        assert len(self.generated) <= self.max_new_tokens
        if len(self.generated) >= self.max_new_tokens:
            self.end(FinishReason.LENGTH)

    def end(self, reason: FinishReason) -> None:
        """The answer is what the host has seen."""
        assert not self.done
        self.finish_reason = reason
        self.pending = 0  # tokens sampled since are no part of the answer

    def tokens(self, begin: int, end: int) -> np.ndarray:
        """Those of the prompt, then new ones; 0 for a token that the host has not seen yet."""
        return self._tokens(self.prompt_keys, begin, end)

    def ids(self, begin: int, end: int) -> np.ndarray:
        """The ids at these positions; in images those of their placeholders."""
        return self._tokens(self.prompt_ids, begin, end)

    def _tokens(self, of_prompt: np.ndarray, begin: int, end: int) -> np.ndarray:
        assert 0 <= begin <= end <= self.length
        prompt = self.prompt_tokens
        if end <= prompt:
            return of_prompt[begin:end]
        first = max(begin - prompt, 0)
        new = np.zeros(end - prompt - first, dtype=np.int32)
        seen = self.generated[first : end - prompt]
        new[: len(seen)] = seen
        return new if begin >= prompt else np.concatenate([of_prompt[begin:], new])

    def __repr__(self) -> str:
        state = self.finish_reason.value if self.finish_reason else f"computed={self.computed}/{self.length}"
        return f"Request({self.index}.{self.sample}, start={self.start}, {state}, pages={len(self.pages)})"


class Branch(Request):
    """A beam of a search, or the prompt (the root) on which its beams stand.

    A beam may stand on another one, up to the position where the two parted. ``generated`` holds all of its new tokens,
    those before ``start`` included.
    """

    __slots__ = ("in_use", "root", "width")

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        # Whether the search still goes on from it. Afterwards only what other beams read of it stays in the cache.
        # Set by the group of beams.
        self.in_use = True
        # Of the root: how many beams the search follows at a time; of a beam: 0. Set when requests are lined up.
        self.width = 0
        # The prompt's own unit. Set when the branch is made.
        self.root: Branch = self

    def fork(self, tokens: list[int], start: int) -> Branch:
        """A new beam of the same prompt with these new tokens, that will read this unit up to ``start``."""
        branch = Branch.__new__(Branch)  # the three `__init__` take four times as long, and beams part in every step
        branch.start = branch.computed = branch.lost_end = branch.read_end = start
        branch.base, branch.pages, branch.slot, branch.refs, branch.copied = None, [], NO_SLOT, 0, 0
        branch.key, branch.index, branch.sample, branch.rank = self.key, self.index, self.sample, self.rank
        branch.prompt_ids, branch.prompt_tokens = self.prompt_ids, self.prompt_tokens
        branch.prompt_keys, branch.places, branch.two_way = self.prompt_keys, self.places, self.two_way
        branch.max_new_tokens, branch.can_stop = self.max_new_tokens, self.can_stop
        branch.generated, branch.pending, branch.seat = tokens, 0, 0
        branch.finish_reason = branch.score = None
        branch.in_use, branch.width, branch.root = True, 0, self.root
        return branch

    @property
    def readable_end(self) -> int:
        return self.length

    @property
    def parted_from(self) -> Branch | None:
        """The beam that this one parted from. It goes on itself, so its state has to be copied before it does.

        None of a beam that stands on the prompt: the prompt's state stays as it is.
        """
        return self.base if isinstance(self.base, Branch) and self.base is not self.root else None

    def most_pages(self, page_size: int) -> int:
        """The root's own pages, and pages for every beam that share nothing.

        With so many a search can always go on, however its beams shared pages before: each gets pages of its own.
        """
        prompt, new = self.prompt_tokens - self.start, self.max_new_tokens - 1
        return -(-prompt // page_size) + self.width * -(-new // page_size)


def units_below(units: Sequence[Unit]) -> list[Unit]:
    """``units`` and all of their ancestors, each once, a base before what stands on it."""
    return list(places_below(units))


def places_below(units: Iterable[Unit]) -> dict[Unit, int]:
    """The place of each unit in ``units_below``."""
    places: dict[Unit, int] = {}
    for unit in units:
        if unit in places:
            continue
        base = unit.base
        if base is not None and base not in places:
            path: list[Unit] = []
            while base is not None and base not in places:
                path.append(base)
                base = base.base
            for found in reversed(path):
                places[found] = len(places)
        places[unit] = len(places)
    return places
