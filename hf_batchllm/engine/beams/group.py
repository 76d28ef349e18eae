"""The beams of a prompt as units of the cache: beams stand on each other, each up to where it parted.

Where several beams go on from one, the best stays in its pages and the others begin pages of their own: no keys and
values are ever copied. Of a beam that has no successor, as much stays as others read. The state that some layers carry
is another matter: each beam needs one of its own, a copy of that of the beam that it parted from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...planning.paged_cache import PagedCache
from ...planning.requests_and_prefixes import NO_SLOT, Branch, Request, Unit, units_below
from .search_rules import FinishedBeam, Searches


class Answer(Request):
    """One of a prompt's results, to be filled in when the search is over."""

    __slots__ = ("parents", "searched")

    def __init__(self, root: Branch, sample: int) -> None:
        super().__init__(root.index, root.prompt_ids, root.max_new_tokens, sample=sample, rank=root.rank)
        self.parents: list[int] = []  # the number of the beam that each of its tokens continued
        self.searched = 0  # steps that the prompt's search took: it may have gone on after this answer was found

    @property
    def made(self) -> int:
        """New tokens of the search, so that reports count all of them."""
        return self.searched


class BeamGroup:
    """A prompt and its beams. ``root`` holds the prompt's last tokens and is read by all beams."""

    def __init__(self, root: Branch, cache: PagedCache, answers: Sequence[Answer]) -> None:
        self.root = root
        self.width = root.width
        self.answers = answers
        self.searches: Searches  # its own, and maybe those of more prompts; set when the call begins, as the next is
        self.place = 0  # in these
        self.beams: list[Branch] = []  # the best first; none before the first tokens, and while the group waits
        self.logits: dict[Request, Any] = {}  # [vocabulary] each, of the beams that have run since the last choice
        self.made = 0  # new tokens of each beam
        self.in_step = False  # whether each beam has just one token to run, or has run it since the last choice
        self._cache = cache
        self._room = 0  # the beams but for `_fresh` have pages up to this position, or further; 0: nobody has looked
        self._fresh: list[Branch] = []  # beams that parted from another one in the last choice, still without pages
        self._tokens: list[list[int]] = []  # new tokens of the beams, while these have no units
        # As they were given to `fork`, [made * width]: two plain lists, which keep Python's collector less busy.
        self._past_parents: list[int] = []
        self._past_tokens: list[int] = []

    @property
    def length(self) -> int:
        """Tokens of each beam, with the prompt."""
        return self.root.prompt_tokens + self.made

    @property
    def without_logits(self) -> list[Branch]:
        """The units that have to run before the search can go on."""
        return [unit for unit in self.beams or [self.root] if unit not in self.logits]

    @property
    def complete(self) -> bool:
        """Whether the logits of all beams are there, so that the next beams can be chosen."""
        return len(self.logits) == max(1, len(self.beams))

    def tokens(self, beam: int) -> list[int]:
        """The new tokens of a beam; none before there are beams."""
        return self.beams[beam].generated if self.beams else []

    def answer(self, finished: FinishedBeam) -> tuple[list[int], list[int]]:
        """The new tokens of a finished beam, and the number of the beam that each of them continued."""
        beam, tokens, parents, width = finished.beam, [], [], self.width
        if finished.token is not None:
            tokens, parents = [finished.token], [beam]
        for first in range((finished.made - 1) * width, -1, -width):  # from its last token back to its first
            tokens.append(self._past_tokens[first + beam])
            beam = self._past_parents[first + beam]
            parents.append(beam)
        return tokens[::-1], parents[::-1]

    @property
    def unshared_pages(self) -> int:
        """Pages that the beams take beside the prompt's if they share none."""
        return self.width * self._cache.pages_for(self.made)

    @property
    def pages(self) -> int:
        """Pages that the beams take beside the prompt's, those of former beams that they read included."""
        units = units_below(self.beams)
        return sum(len(unit.pages) for unit in units if isinstance(unit, Branch) and unit is not self.root)

    @property
    def slots_to_come(self) -> int:
        """Slots for states that the beams have yet to be given, of a model whose layers carry states."""
        return self.width - sum(beam.slot != NO_SLOT for beam in self.beams)

    @property
    def has_room(self) -> bool:
        """Whether the beams certainly have pages for their next tokens."""
        return self.length <= self._room and not self._fresh

    @property
    def missing(self) -> int:
        """Pages that the beams lack for their next tokens."""
        length, missing = self.length, self._cache.missing
        return sum([missing(beam, length) for beam in self._to_look_at])

    def reserve(self) -> None:
        """Give the beams the pages that they lack for their next tokens."""
        length, page_size, beams = self.length, self._cache.page_size, self._to_look_at
        for beam in beams:
            self._cache.reserve(beam, length)
        ends = [beam.start + len(beam.pages) * page_size for beam in beams]
        if beams is self._fresh:
            ends.append(self._room)
        self._room, self._fresh = min(ends, default=0), []

    @property
    def _to_look_at(self) -> list[Branch]:
        """The beams that may lack pages for their next tokens."""
        return self._fresh if self.length <= self._room else self.beams

    def fork(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Make the next beams: each goes on from the present beam numbered in ``parents``, with a new token.

        All present beams have run.
        """
        self.logits.clear()
        self._past_parents += parents
        self._past_tokens += tokens
        before, start = self.beams, self.length
        self.made += 1
        if not before:
            self._stand_on_the_prompt([[token] for token in tokens])
            self.in_step = True
            return
        self.in_step = True
        stay = set(parents)
        if len(stay) == len(before):  # each goes on in its own pages
            self.beams = [before[parent] for parent in parents]
            for beam, token in zip(self.beams, tokens, strict=True):
                beam.generated.append(token)
            return
        beams: list[Branch] = []
        fresh: list[Branch] = []
        gone_on = set[int]()  # with their best successor, which stays in their pages
        for parent, token in zip(parents, tokens, strict=True):
            unit = before[parent]
            if parent in gone_on:
                base, unit = unit, unit.fork([*unit.generated[:-1], token], start)
                self._cache.attach(unit, base)
                fresh.append(unit)
            else:
                gone_on.add(parent)
                unit.generated.append(token)
            beams.append(unit)
        self.beams, self._fresh = beams, fresh
        unread = False
        for parent, unit in enumerate(before):
            if parent not in stay:
                unit.in_use = False
                unread |= self._leaves_unread(unit)
                self._cache.retire(unit)
        if unread:
            self._cut_unread()

    def dissolve(self) -> None:
        """Give up the units of the beams; their tokens are remembered."""
        if self.beams:  # else they were given up before
            self._tokens = [list(beam.generated) for beam in self.beams]
        for beam in self.beams:
            self._abandon(beam)
        self.beams, self._fresh, self._room, self.in_step = [], [], 0, False
        self.logits.clear()
        assert self.root.refs == 0

    def restore(self) -> None:
        """Make units for the beams again, each with pages of its own; their new tokens have to be computed again."""
        self._stand_on_the_prompt(self._tokens)
        self._tokens = []
        for beam in self.beams:
            self._cache.reserve(beam, beam.length)

    def end(self) -> None:
        """The search is over: give up all units."""
        self.dissolve()
        self._tokens = []
        self._abandon(self.root)

    def _stand_on_the_prompt(self, tokens: Sequence[list[int]]) -> None:
        for own in tokens:
            beam = self.root.fork(own, self.root.prompt_tokens)
            self._cache.attach(beam, self.root)
            self.beams.append(beam)

    def _abandon(self, unit: Branch) -> None:
        unit.in_use = False
        self._cache.retire(unit)

    @staticmethod
    def _leaves_unread(unit: Branch) -> bool:
        """Whether something stays of a beam out of use when ``unit`` goes, and fewer read it: it may have to be cut."""
        below: Unit | None = unit
        while isinstance(below, Branch) and not below.in_use:  # the prompt's unit is in use as long as the search
            if below.refs > (below is not unit):
                return True
            below = below.base
        return False

    def _cut_unread(self) -> None:
        """Cut beams that are no longer in use down to what others read of them."""
        read: dict[Unit, int] = {}
        for beam in self.beams:
            unit: Unit = beam
            while (below := unit.base) is not None and below is not self.root:
                seen = below in read
                if not seen or read[below] < unit.start:
                    read[below] = unit.start
                if seen:
                    break
                unit = below
        for below, upto in read.items():
            assert isinstance(below, Branch)
            if not below.in_use and below.read_end != upto:
                below.read_end = upto
                self._cache.cut(below, upto)
                del below.generated[upto - below.prompt_tokens :]
