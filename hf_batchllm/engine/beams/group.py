"""The beams of a prompt as units of the cache: they stand on each other, each up to where it parted.

Of the beams that go on from one, the best stays in its pages and the others begin pages of their own: no beam is ever
copied. One that nobody follows any more leaves what others read of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...planning.paged_cache import PagedCache
from ...planning.units import Branch, Request, units_below


class Answer(Request):
    """One of a prompt's results, to be filled in when the search is over."""

    __slots__ = ("parents", "searched")

    def __init__(self, root: Branch, sample: int) -> None:
        super().__init__(root.index, root.prompt_ids, root.max_new_tokens, sample=sample, rank=root.rank)
        self.parents: list[int] = []  # which beam each of its tokens was picked from
        self.searched = 0  # new tokens that the search has looked at: its own may be fewer

    @property
    def made(self) -> int:
        return self.searched


class BeamGroup:
    """A prompt and its beams.

    ``root`` holds the last of the prompt's tokens and is read by all beams.
    """

    def __init__(self, root: Branch, cache: PagedCache, answers: Sequence[Answer]) -> None:
        self.root = root
        self.width = root.width
        self.answers = answers
        self.beams: list[Branch] = []  # the best first; none before the first tokens, or while the group waits
        self.logits: dict[Branch, Any] = {}  # of those that the step has come to; [vocabulary] each
        self.made = 0  # new tokens of each beam
        self.parents: list[list[int]] = []  # [beams]: which beam each of their tokens was picked from
        self.slots: list[BeamChoice] = [BeamChoice([], []) for _ in range(self.width)]
        self._cache = cache
        self._tokens: list[list[int]] = []  # of the beams, while there are none

    @property
    def waiting_for(self) -> list[Branch]:
        """Whose logits are to come before the search can go on."""
        return [unit for unit in self.beams or [self.root] if unit not in self.logits]

    @property
    def complete(self) -> bool:
        return len(self.logits) == max(1, len(self.beams))

    def tokens(self, beam: int) -> list[int]:
        """The new tokens of a beam; of the prompt, none."""
        return self.beams[beam].generated if self.beams else []

    def all_tokens(self) -> list[list[int]]:
        """Of each beam, wherever the group is."""
        return [list(beam.generated) for beam in self.beams] or self._tokens

    @property
    def all_pages(self) -> int:
        """Pages that its beams take when each has its own, beside the prompt's."""
        return self.width * self._cache.pages_for(self.made)

    @property
    def pages(self) -> int:
        """Pages that its beams, and what they stand on above the prompt, hold."""
        units = units_below(self.beams)
        return sum(len(unit.pages) for unit in units if isinstance(unit, Branch) and unit is not self.root)

    def fork(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """The beams of the next step: from which of the present ones each goes on, and with which token."""
        self.logits.clear()
        cache, before = self._cache, self.beams
        self.parents = [[*(self.parents[parent] if before else ()), parent] for parent in parents]
        self.made += 1
        self.beams = []
        if not before:
            self._stand_on_the_prompt([[token] for token in tokens])
            return
        stays = {parent: rank for rank, parent in reversed(list(enumerate(parents)))}  # the best of each one's children
        for rank, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
            unit = before[parent]
            if stays[parent] != rank:
                base, unit = unit, unit.fork([*unit.generated, token], unit.length)
                cache.attach(unit, base)
            self.beams.append(unit)
        for parent, rank in stays.items():
            before[parent].generated.append(tokens[rank])
        for parent, unit in enumerate(before):
            if parent not in stays:
                self._leave(unit)
        if len(stays) < len(before):
            self._trim()

    def dissolve(self) -> None:
        """Give up all that its beams have computed; their tokens are known."""
        self._tokens = self.all_tokens()
        for beam in self.beams:
            self._leave(beam)
        self.beams = []
        self.logits.clear()
        assert self.root.refs == 0

    def restore(self) -> None:
        """The beams once more, each in pages of its own; what they have had is to be computed again."""
        self._stand_on_the_prompt(self._tokens)
        self._tokens = []
        for beam in self.beams:
            self._cache.reserve(beam, beam.length)

    def end(self) -> None:
        for beam in self.beams:
            self._leave(beam)
        self.beams = []
        self.logits.clear()
        self._leave(self.root)

    def _stand_on_the_prompt(self, tokens: Sequence[list[int]]) -> None:
        for own in tokens:
            beam = self.root.fork(own, len(self.root.prompt_ids))
            self._cache.attach(beam, self.root)
            self.beams.append(beam)

    def _leave(self, unit: Branch) -> None:
        unit.held = False
        self._cache.retire(unit)

    def _trim(self) -> None:
        """Of beams that nobody goes on from, keep no more than others read."""
        read: dict[Branch, int] = {}
        for unit in units_below(self.beams):
            if isinstance(unit.base, Branch):
                read[unit.base] = max(read.get(unit.base, 0), unit.start)
        for unit, upto in read.items():
            if not unit.held:
                unit.wanted = upto
                self._cache.cut(unit, upto)
                del unit.generated[upto - len(unit.prompt_ids) :]


class BeamChoice:
    """What stands in one of the places for answers."""

    __slots__ = ("parents", "stopped", "tokens")

    def __init__(self, tokens: list[int], parents: list[int], stopped: bool = False) -> None:
        self.tokens = tokens
        self.parents = parents
        self.stopped = stopped
