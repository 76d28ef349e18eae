"""What a list of prompts shares: segments, groups, and the first words of the largest segments."""

from __future__ import annotations

import heapq
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

_LEVELS_SHOWN = 4  # in the summary's table; deeper levels share one row
_SEGMENTS_LABELLED = 12  # as many as a picture has room for
_LABEL_TOKENS = 40  # decoded of each segment
_LABEL_CHARACTERS = 160


class HasIds(Protocol):
    """A prompt, as far as a label needs it."""

    @property
    def ids(self) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that are computed once for all prompts below: ``prompts[prompt].ids[start:end]``."""

    index: int  # its place in plan.segments; a parent comes before its children
    parent: int  # index of the segment that ends where this one starts, -1 at the top
    prompt: int  # the first member in run order
    start: int  # token position, counted from the start of the prompt
    end: int
    members: int  # prompts anywhere below

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def saved_tokens(self) -> int:
        """Tokens that all members but one need not compute."""
        return len(self) * (self.members - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The prompts below one top-level segment; they run one after the other."""

    shared_tokens: int  # shared by all of them; deeper segments may share more among some
    prompts: np.ndarray  # indices, in run order

    @property
    def size(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True, eq=False, repr=False)
class SharingPlan:
    """What a list of prompts shares. ``print(plan)`` sums it up; in a notebook it is a picture."""

    HISTOGRAM_COLUMNS: ClassVar[tuple[str, str, str, str]] = ("group size", "groups", "prompts", "shared tokens (each)")

    segments: tuple[Segment, ...]  # depth-first, in run order
    parents: np.ndarray  # [prompts] index of the last segment of each prompt, -1 for none
    order: np.ndarray  # [prompts] indices of the prompts in the order to run them: sharers are neighbours
    total_tokens: int  # in all prompts
    computed_tokens: int  # tokens that the model must run over
    lengths: np.ndarray  # [prompts] tokens of each
    labels: dict[int, str] = field(default_factory=dict)  # segment -> its first words, where it saves much
    of_sequences: bool = False  # the plan of a run: each prompt once per sample, without those that could not run
    longest_unshared: int = 0  # where nothing is computed once: tokens of the longest beginning that prompts share
    min_shared_tokens: int = 0  # the setting that the plan was made with
    state_price: int = 0  # tokens that a prefix must save besides: see docs/hybrids.md
    multiple: int = 1  # of which the end of each segment is one: pages, where ``invariant=True`` needs whole ones
    aligned: int = 1  # the cache holds a sequence in pieces that begin at multiples of this: pages, with the same

    @property
    def prompt_tokens(self) -> int:
        """``total_tokens``, under the name that it has in the report of a run."""
        return self.total_tokens

    @property
    def saved_tokens(self) -> int:
        return self.total_tokens - self.computed_tokens

    @property
    def saving(self) -> float:
        """The fraction of the tokens that need not be computed, from 0 to 1."""
        return self.saved_tokens / self.total_tokens if self.total_tokens else 0.0

    @property
    def why_nothing(self) -> str:
        """A sentence, where prompts begin alike and yet nothing is saved; else empty."""
        if self.segments or self.longest_unshared < 2:  # a BOS token is no beginning to speak of
            return ""
        whole = f", and prefixes end at multiples of {self.multiple}" if self.multiple > 1 else ""
        price = f", and the memory of a prefix's state is worth {self.state_price:,} more" if self.state_price else ""
        return (
            f"Prompts begin alike for up to {self.longest_unshared:,} tokens: too few to share "
            f"(`min_shared_tokens` is {self.min_shared_tokens:,}{price}{whole})."
        )

    @cached_property
    def _levels(self) -> list[int]:
        """Of each segment: 1 at the top, 2 for its children, and so on."""
        levels: list[int] = []
        for segment in self.segments:
            levels.append(1 + (levels[segment.parent] if segment.parent >= 0 else 0))
        return levels

    @cached_property
    def depth(self) -> int:
        """The most segments that lie one below the other."""
        return max(self._levels, default=0)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """One group for each top-level segment, in run order; prompts that share nothing are in none."""
        place = np.empty(len(self.order), np.int64)
        place[self.order] = np.arange(len(self.order))
        found = []
        for segment in self._top_segments:
            begin = place[segment.prompt]
            found.append(Group(segment.end, self.order[begin : begin + segment.members]))
        return tuple(found)

    @cached_property
    def _top_segments(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.parent < 0]

    def largest_savers(self, count: int = _SEGMENTS_LABELLED) -> list[Segment]:
        """The segments that save the most tokens, the largest saving first."""
        return heapq.nsmallest(count, self.segments, key=lambda segment: (-segment.saved_tokens, segment.index))

    def add_labels(self, prompts: Sequence[HasIds], decode: Callable[[list[int]], str | None]) -> None:
        """Fills in ``labels``. ``prompts``: those of the plan. ``decode``: gives None where there is no tokenizer.

        A tokenizer that fails on a segment costs its label and nothing else.
        """
        for segment in self.largest_savers():
            end = min(segment.end, segment.start + _LABEL_TOKENS)
            try:
                text = decode(prompts[segment.prompt].ids[segment.start : end].tolist())
            except Exception:
                continue
            if not isinstance(text, str):
                continue
            text = text.strip("\ufffd")  # a character may be cut off in the middle
            if text.strip():
                goes_on = end < segment.end or len(text) > _LABEL_CHARACTERS
                self.labels[segment.index] = f"{text[:_LABEL_CHARACTERS].rstrip()} …" if goes_on else text

    def _totals(self) -> list[tuple[str, str, str]]:
        """Rows of (name, amount, share)."""
        computed = f"{1 - self.saving:.1%}" if self.total_tokens else ""
        return [
            ("prompts", f"{len(self.order):,}", ""),
            ("tokens asked for", f"{self.total_tokens:,}", ""),
            ("tokens to compute", f"{self.computed_tokens:,}", computed),
            ("tokens saved", f"{self.saved_tokens:,}", f"{self.saving:.1%}" if self.total_tokens else ""),
            ("levels of sharing", f"{self.depth:,}", ""),
        ]

    def histogram(self) -> list[tuple[str, str, str, str]]:
        """Rows of (group size, groups, prompts, tokens shared in each), by level and then by powers of two."""
        buckets: dict[tuple[int, int], list[Segment]] = {}
        for segment, level in zip(self.segments, self._levels, strict=True):
            deep = level > _LEVELS_SHOWN
            bucket = (_LEVELS_SHOWN + 1, 0) if deep else (level, (segment.members - 1).bit_length())
            buckets.setdefault(bucket, []).append(segment)
        rows = []
        alone = len(self.order) - sum(segment.members for segment in self._top_segments)
        if alone:
            rows.append(("1 (alone)", f"{alone:,}", f"{alone:,}", "-"))
        for (level, _), alike in sorted(buckets.items()):
            size = _span(min(segment.members for segment in alike), max(segment.members for segment in alike))
            tokens = _span(min(map(len, alike)), max(map(len, alike)))
            members = f"{sum(segment.members for segment in alike):,}"
            if level > 1:  # part of a group that the table has already
                size, tokens = f"level {level}{'+' if level > _LEVELS_SHOWN else ''}: {size}", f"+ {tokens}"
                members = members if level <= _LEVELS_SHOWN else ""  # prompts would count once for each level
            rows.append((size, f"{len(alike):,}", members, tokens))
        return rows

    def __repr__(self) -> str:
        return (
            f"SharingPlan(prompts={len(self.order)}, total_tokens={self.total_tokens}, "
            f"computed_tokens={self.computed_tokens}, saving={self.saving:.3f}, segments={len(self.segments)})"
        )

    def __str__(self) -> str:
        lines = ["What the prompts share"]
        lines += [f"  {what:<18}{amount:>18}{share:>9}".rstrip() for what, amount, share in self._totals()]
        if self.why_nothing:
            lines += ["", *textwrap.wrap(self.why_nothing, 78, initial_indent="  ", subsequent_indent="  ")]
        if self.segments:
            lines.append("")
            for size, groups, count, shared in [self.HISTOGRAM_COLUMNS, *self.histogram()]:
                lines.append(f"  {size:<18}{groups:>12}{count:>14}{shared:>24}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from .views.plan import plan_html  # imported only when shown

        return plan_html(self)


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} - {high:,}"
