"""The beams of a prompt as units of the cache: beams stand on each other, each up to where it parted.

Where several beams go on from one, the best stays in its pages and the others begin pages of their own: no keys and
values are ever copied. Of a beam that has no successor, as much stays as others read. The state that some layers carry
is another matter: each beam needs one of its own, a copy of that of the beam that it parted from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...planning.paged_cache import PagedCache
from ...planning.requests_and_prefixes import NO_SLOT, Branch, Request, Unit, units_below


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
        self.beams: list[Branch] = []  # the best first; none before the first tokens, and while the group waits
        self.logits: dict[Branch, Any] = {}  # [vocabulary] each, of the beams that have run since the last choice
        self.made = 0  # new tokens of each beam
        self.finished = [FinishedBeam()] * self.width  # the best first
        self.unchanged = list(range(self.width))  # the places of answers in a step that brings no better one
        self._cache = cache
        self._tokens: list[list[int]] = []  # new tokens of the beams, while these have no units
        self._steps: list[tuple[Sequence[int], Sequence[int]]] = []  # [made]  as they were given to `fork`

    @property
    def length(self) -> int:
        """Of each beam, with the prompt."""
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
        beam, tokens, parents = finished.beam, [], []
        if finished.token is not None:
            tokens, parents = [finished.token], [beam]
        for its_parents, its_tokens in reversed(self._steps[: finished.made]):
            tokens.append(its_tokens[beam])
            beam = its_parents[beam]
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

    def fork(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Make the next beams: each goes on from the present beam numbered in ``parents``, with a new token."""
        self.logits.clear()
        before, self.beams = self.beams, []
        self._steps.append((parents, tokens))
        self.made += 1
        if not before:
            self._stand_on_the_prompt([[token] for token in tokens])
            return
        stays: dict[int, int] = {}  # the best successor of each beam
        for rank, parent in enumerate(parents):
            unit = before[parent]
            if stays.setdefault(parent, rank) != rank:
                base, unit = unit, unit.fork([*unit.generated, tokens[rank]], unit.length)
                self._cache.attach(unit, base)
            self.beams.append(unit)
        for parent, rank in stays.items():
            before[parent].generated.append(tokens[rank])
        if len(stays) < len(before):
            for parent, unit in enumerate(before):
                if parent not in stays:
                    self._abandon(unit)
            self._cut_unread()

    def dissolve(self) -> None:
        """Give up the units of the beams; their tokens are remembered."""
        if self.beams:  # else they were given up before
            self._tokens = [list(beam.generated) for beam in self.beams]
        for beam in self.beams:
            self._abandon(beam)
        self.beams = []
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
        for beam in self.beams:
            self._abandon(beam)
        self.beams = []
        self.logits.clear()
        self._abandon(self.root)

    def _stand_on_the_prompt(self, tokens: Sequence[list[int]]) -> None:
        for own in tokens:
            beam = self.root.fork(own, self.root.prompt_tokens)
            self._cache.attach(beam, self.root)
            self.beams.append(beam)

    def _abandon(self, unit: Branch) -> None:
        unit.in_use = False
        self._cache.retire(unit)

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


class FinishedBeam(NamedTuple):
    """One of the best finished beams so far: an answer, if it stays among them. Empty while there are too few.

    Mostly it does not stay, so its tokens are put together in the end.
    """

    made: int = 0  # tokens of the beam that it was
    beam: int = 0  # its number among the beams of then
    token: int | None = None  # one more, with which it ended
    stopped: bool = False
