"""The sequences of one call: what they share, the pages that they take, and how they are lined up in the cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from ..config import BatchConfig
from ..inputs.prompts import Prompt
from ..results.sharing_plan import SharingPlan
from .lineup import Lineup, line_up, most_pages_alone, pages_at_once
from .paged_cache import PagedCache
from .sharing import make_plan

T = TypeVar("T")


class CallPlan:
    """One entry for each sequence: several samples of a prompt are that prompt several times, as they share all of it.

    samples: of each prompt. new_tokens: at most, of each prompt. widths: of a beam search, the beams of each prompt.
    whole_pages: as ``make_plan`` has it.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        samples: Sequence[int],
        new_tokens: Sequence[int],
        widths: Sequence[int] | None,
        config: BatchConfig,
        whole_pages: bool = False,
    ) -> None:
        self._config = config
        self._whole_pages = whole_pages
        self._samples = samples
        self._widths = widths
        self.prompts = self.each(prompts)
        self.new_tokens = self.each(new_tokens)
        self._state_price = 0
        self._plan_it()

    def ask_more_of_prefixes(self, tokens: int) -> None:
        """Plan anew, if need be: a prefix must save as many tokens beyond ``min_shared_tokens`` to be kept."""
        if tokens != self._state_price:
            self._state_price = tokens
            self._plan_it()

    def _plan_it(self) -> None:
        self.sharing: SharingPlan = self._planned(self.new_tokens)
        # Pages that the whole list takes when all of it is in the cache at the same time.
        self.pages_at_once = pages_at_once(
            self.prompts, self.sharing, self.new_tokens, self._config.page_size, self._widths
        )

    def each(self, of_prompts: Sequence[T]) -> list[T]:
        """For each sequence what its prompt has."""
        return [value for value, count in zip(of_prompts, self._samples, strict=True) for _ in range(count)]

    @property
    def pages_needed(self) -> int:
        """Pages without which the longest sequence cannot run; each prefix below it may leave the end of one empty."""
        alone = most_pages_alone(self.prompts, self.new_tokens, self._config.page_size, self._widths)
        return alone + self.sharing.depth

    @property
    def slots_at_once(self) -> int:
        """Slots for states that the whole list takes at the same time: of each sequence, beam and prefix."""
        return len(self.prompts) + sum(self._widths or ()) + len(self.sharing.segments)

    @property
    def slots_needed(self) -> int:
        """Slots without which a sequence cannot run: its own and those of its beams. Without prefixes, if need be."""
        return 1 + max(self._widths or (0,))

    def line_up(self, cache: PagedCache, can_stop: Sequence[bool], reach: Sequence[int] | None) -> Lineup:
        """``can_stop``: of each prompt; ``reach``: of each sequence, as ``planning.lineup.line_up`` has it."""
        return line_up(
            self.prompts,
            self.sharing,
            self.new_tokens,
            cache,
            self._samples,
            can_stop=self.each(can_stop),
            reach=reach,
            widths=self._widths,
        )

    def leave_out(self, sequences: Collection[int]) -> None:
        """For the report and the bar: sequences that cannot run share nothing."""
        kept = [place for place in range(len(self.prompts)) if place not in sequences]
        self.prompts = [self.prompts[place] for place in kept]
        self.new_tokens = [self.new_tokens[place] for place in kept]
        self.sharing = self._planned(self.new_tokens)

    def _planned(self, new_tokens: list[int]) -> SharingPlan:
        plan = make_plan(self.prompts, self._config, new_tokens, self._state_price, self._whole_pages)
        return replace(plan, of_sequences=True)
