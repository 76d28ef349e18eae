"""What a list of prompts shares: segments, groups, and the first words of the largest segments."""

from __future__ import annotations

import heapq
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import starmap
from typing import ClassVar, Protocol

import numpy as np

from ..wording import counted
from .views.chart import WIDTH, number, plot, rectangle, ticks, titled, x_axis
from .views.html import caption, count, figures, folded, head, key, one_line, percent, shorter, table, text, tiles, view
from .views.icicle import Icicle, Shades, icicle

_LEVELS_SHOWN = 4  # in the summary's table; deeper levels share one row
_SEGMENTS_LABELLED = 12  # as many as a picture has room for
_LABEL_TOKENS = 40  # decoded of each segment
_LABEL_CHARACTERS = 160

_HEIGHT, _HEIGHT_OF_NOTHING_SHARED = 280, 140  # of the picture
_SEGMENTS_LISTED = 8  # in the table below it
_GAP_FROM = 4  # pixels: smaller boxes have no gap around them
# Shares of the width that a short label needs, a full one, and either in a narrow view; pixels of a line.
_SHORT_LABEL, _FULL_LABEL, _LABEL_IF_NARROW = 0.035, 0.11, 0.3
_LABEL_HEIGHT = 20
_TOOLTIP_CHARACTERS = 80


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
        """The level of each segment: 1 at the top, 2 for its children, and so on."""
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
        body = plan_body(self, "sequence" if self.of_sequences else "prompt")
        return view("What the prompts share", body, str(self))


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} - {high:,}"


# -- the picture -------------------------------------------------------------------------------------------------------


def plan_body(plan: SharingPlan, thing: str) -> str:
    """``thing``: "prompt", or "sequence" for the plan of a run, where each sample of a prompt counts."""
    totals = [
        (f"{len(plan.order):,}", thing if len(plan.order) == 1 else f"{thing}s"),
        (f"{plan.total_tokens:,}", "tokens asked for"),
        (f"{plan.computed_tokens:,}", "tokens to compute"),
    ]
    if plan.total_tokens:
        totals.append((percent(plan.saving), "saved"))
    body = tiles(totals)
    if plan.why_nothing:
        body += caption(plan.why_nothing)
    if len(plan.order):
        body += _Picture(plan, layout_of(plan), thing).html()
    return body + _tables(plan, thing) if plan.segments else body


def layout_of(plan: SharingPlan) -> Icicle:
    """Where the plan's segments and prompts stand in a picture."""
    rows = [(each.parent, each.prompt, each.start, each.end, each.members) for each in plan.segments]
    return icicle(np.array(rows, np.int64).reshape(-1, 5), plan.parents, plan.order, plan.lengths)


class _Picture:
    """The prompts' tree. Areas are tokens; darker blocks are shared by more prompts."""

    def __init__(self, plan: SharingPlan, tree: Icicle, thing: str) -> None:
        self.plan, self.tree, self.thing = plan, tree, thing
        self.prompts = len(plan.order)
        self.height = _HEIGHT if plan.segments else _HEIGHT_OF_NOTHING_SHARED
        self.scale, self.across = self.height / tree.limit, WIDTH / self.prompts
        blocks = zip(tree.blocks.tolist(), tree.block_left.tolist(), strict=True)
        segments = [(plan.segments[index], left) for index, left in blocks]
        self.blocks = [(segment, left) for segment, left in segments if segment.start < tree.limit]  # not below the cut
        drawn = tree.saving[(tree.shared > 0) & (tree.top < tree.limit)]
        self.shades = Shades([segment.members for segment, _ in self.blocks] + [_members(each) for each in drawn])

    def html(self) -> str:
        tree, thing = self.tree, self.thing
        shades = [(f"hfb-s{shade}", name) for shade, name in self.shades.names()]
        legend = key([("hfb-own", "1 (its own)"), *shades], f"{thing.title()}s that share a block:") if shades else ""
        drawing = "".join([*map(self._block, self.blocks), *self._columns()])
        marks = [(level * self.scale, count(level)) for level in ticks(tree.limit, 5, whole=True)]
        about = f"{counted(self.prompts, thing)}, {percent(self.plan.saving)} of their tokens shared"
        over = "".join(map(self._label, self.blocks))
        if tree.is_cut:
            note = f"cut off here: the longest {thing} has {self.plan.lengths.max():,} tokens"
            over += f'<div class="hfb-cut"></div><div class="hfb-note">{text(note)}</div>'
        return (
            head('<span class="hfb-dim">Tokens, from the first one down</span>', legend)
            + plot(drawing, self.height, marks, about, over)
            + x_axis(self.prompts, f"{thing}s, in the order they run", whole=True)
            + caption(self._caption())
        )

    def _caption(self) -> str:
        sentences = f"Each {self.thing} is a column, its first token at the top. "
        if self.plan.segments:
            sentences += (
                f"A coloured block is a beginning that the {self.thing}s below it have in common: its tokens are "
                "computed once for all of them. "
            )
        elif self.prompts > 1:
            sentences += "No tokens are computed once for several of them. "
        if len(self.tree.size) < self.prompts:
            sentences += "Neighbours too narrow to be told apart are drawn as one column, their average."
        return sentences.strip()

    def _box(self, kind: str, left: float, members: float, top: float, bottom: float) -> str:
        """``left``, ``members``: in prompts. ``top``, ``bottom``: in tokens. Nothing is drawn below the cut."""
        x, width = left * self.across, members * self.across
        y, end = (min(level, self.tree.limit) * self.scale for level in (top, bottom))
        return rectangle(kind + (" hfb-gap" if min(width, end - y) >= _GAP_FROM else ""), x, y, x + width, end)

    def _block(self, block: tuple[Segment, int]) -> str:
        segment, left = block
        label = self.plan.labels.get(segment.index)
        tooltip = (
            f"{segment.members:,} {self.thing}s share {counted(len(segment), 'token')}"
            f"{f' after {segment.start:,} others' if segment.start else ''}: {segment.saved_tokens:,} saved"
        )
        if self.thing == "prompt":  # sequences are not numbered as the user's prompts are
            tooltip += f"; the first is prompt {segment.prompt}"
        if label is not None:
            tooltip += f"\n“{shorter(label, _TOOLTIP_CHARACTERS)}”"
        kind = f"hfb-s{self.shades.of(segment.members)}"
        return titled(tooltip, self._box(kind, left, segment.members, segment.start, segment.end))

    def _columns(self) -> Iterator[str]:
        """Tokens that prompts have for themselves, and above them what is shared in groups too small for a block."""
        tree = self.tree
        rows = zip(tree.first, tree.size, tree.top, tree.shared, tree.saving, tree.own, strict=True)
        for first, size, top, shared, saving, own in (map(float, row) for row in rows):
            drawn, end = "", top + shared
            if shared and top < tree.limit:
                drawn = self._box(f"hfb-s{self.shades.of(_members(saving))}", first, size, top, end)
            drawn += self._box("hfb-own", first, size, end, end + own)
            if size == 1 and self.thing == "prompt":
                tooltip = f"prompt {self.plan.order[int(first)]}: {counted(int(own), 'token')} of its own"
            else:
                tooltip = f"{counted(int(size), self.thing)}: {count(own)} own tokens{' each' if size > 1 else ''}"
            if shared:
                tooltip += f", {count(shared)} shared in small groups ({percent(saving)} of these saved)"
            yield titled(tooltip, drawn)

    def _label(self, block: tuple[Segment, int]) -> str:
        """What a block says, if it has room."""
        segment, left = block
        width = segment.members / self.prompts
        height = (min(segment.end, self.tree.limit) - segment.start) * self.scale
        if width < _SHORT_LABEL or height < _LABEL_HEIGHT:
            return ""
        full = width >= _FULL_LABEL
        lines = f"<span>{f'{len(segment):,} tokens ' if full else ''}× {segment.members:,}</span>"
        label = self.plan.labels.get(segment.index)
        if label is not None and full and height > 2 * _LABEL_HEIGHT:
            lines += f'<span class="hfb-said">{one_line(label, _TOOLTIP_CHARACTERS)}</span>'
        kind = f"hfb-in hfb-i{self.shades.of(segment.members)}{'' if width >= _LABEL_IF_NARROW else ' hfb-wide'}"
        place = f"left:{100 * left / self.prompts:.2f}%;width:{100 * width:.2f}%"
        down = f"top:{number(segment.start * self.scale)}px;height:{number(height)}px"
        return f'<div class="{kind}" style="{place};{down}">{lines}</div>'


def _members(saving: float) -> float:
    """How many prompts share what a column's prompts share in small groups, on average."""
    return max(2.0, round(1 / max(1 - saving, 1e-9)))


def _tables(plan: SharingPlan, thing: str) -> str:
    """What saves most, and all groups by their size."""
    segments = plan.largest_savers(_SEGMENTS_LISTED)
    rows = []
    for segment in segments:
        label = plan.labels.get(segment.index)
        of = f"of prompt {segment.prompt}" if thing == "prompt" else ""
        begins = f'<span class="hfb-dim">tokens {segment.start:,} to {segment.end:,} {of}</span>'
        if label is not None:
            begins = f'<div class="hfb-text">{"… " if segment.start else ""}{one_line(label, 140)}</div>'
        rows.append(figures(begins, f"{segment.members:,}", f"{len(segment):,}", f"{segment.saved_tokens:,}"))
    top = figures("Largest shared beginnings", f"{thing}s", "tokens", "saved", tag="th")
    more = len(plan.segments) - len(segments)
    largest = table("", top, rows) + (caption(f"and {more:,} more") if more else "")
    sizes = table("hfb-narrow", figures(*plan.HISTOGRAM_COLUMNS, tag="th"), starmap(figures, plan.histogram()))
    return largest + folded("Groups by size", sizes)
