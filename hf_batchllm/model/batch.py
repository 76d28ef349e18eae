"""A batch: a step as arrays. Tokens for the model and metadata for attention stay apart.

Everything is packed: the tokens of all units stand in one row, decode rows first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain

import numpy as np
import torch

from ..planning.requests_and_prefixes import Unit
from ..planning.step import Chunk
from .draft_rows import DraftRows
from .states.state_batch import StateBatch


@dataclass(frozen=True)
class TokenBatch:
    """What the model is called with."""

    input_ids: torch.Tensor  # [tokens]
    position_ids: torch.Tensor  # [tokens], or [3, tokens] where images take places in height and width
    logits_rows: torch.Tensor  # [samples + asked]  tokens whose logits are sampled, then tokens of ``ModelBatch.asked``
    row_seats: torch.Tensor  # [rows]  where the device keeps the last token of each decode row
    sample_seats: torch.Tensor  # [samples]  where the device puts each sampled token
    made: torch.Tensor  # [samples]  new tokens that each sampled request has had so far

    def to(self, device: torch.device) -> TokenBatch:
        return TokenBatch(*(sent(getattr(self, field.name), device) for field in fields(self)))


@dataclass(frozen=True)
class UnitTable:
    """The units that a step reads or writes; each stands behind the unit it is built on."""

    base: list[int]  # [units]  index of the unit below, -1 for none
    start: list[int]  # [units]  position of a unit's first token; of its base it reads the positions before
    page_begin: np.ndarray  # [units + 1]  a unit's pages are [page_begin[i], page_begin[i + 1])
    page: np.ndarray  # [pages]  a unit's page i holds the positions from start + i * page_size

    @staticmethod
    def of(places: dict[Unit, int]) -> UnitTable:
        """``places``: each unit's index, in their order."""
        pages = [unit.pages for unit in places]
        page_begin = np.zeros(len(pages) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, pages), np.int64, len(pages)), out=page_begin[1:])
        return UnitTable(
            base=[-1 if unit.base is None else places[unit.base] for unit in places],
            start=[unit.start for unit in places],
            page_begin=page_begin,
            page=np.fromiter(chain.from_iterable(pages), np.int64, int(page_begin[-1])),
        )

    def slots(self, unit: int, begin: int, end: int, page_size: int) -> np.ndarray:
        """The slots of a unit's tokens at positions ``[begin, end)``; page ``p`` begins with slot ``p * page_size``."""
        offsets = np.arange(begin - self.start[unit], end - self.start[unit])
        return self._slots(self.page_begin[unit], offsets, page_size)

    def slots_of_each(self, units: np.ndarray, positions: np.ndarray, page_size: int) -> np.ndarray:
        """The slot of each token: of the unit in ``units`` [tokens], at the position in ``positions`` [tokens]."""
        return self._slots(self.page_begin[units], positions - np.array(self.start)[units], page_size)

    def _slots(self, page_begin: np.ndarray, offsets: np.ndarray, page_size: int) -> np.ndarray:
        page, offset = np.divmod(offsets, page_size)
        slots: np.ndarray = self.page[page_begin + page] * page_size + offset
        return slots


@dataclass(frozen=True)
class Span:
    """A run of tokens of one unit in the batch: a decode row, or a chunk of a prompt."""

    unit: int
    begin: int  # its tokens in the batch are [begin, end)
    end: int
    position: int  # in the unit's sequence, of its first token


@dataclass(frozen=True)
class TwoWay:
    """Where tokens of an image see all of the image, also what is behind them."""

    sees_to: np.ndarray  # [tokens]  the position up to which each token sees
    only_with_window: bool  # whether that is so only in layers with a sliding window


@dataclass(frozen=True)
class Copies:
    """Tokens of a shared page, of which each unit that goes on in that page has a copy."""

    source: torch.Tensor  # [copied]  slots
    target: torch.Tensor  # [copied]  slots
    row: np.ndarray  # [copied]  the first row of the step that reads a copy

    @staticmethod
    def of(
        chunks: Sequence[Chunk],
        begins: np.ndarray,
        table: UnitTable,
        places: dict[Unit, int],
        page_size: int,
        tensor: Callable[[np.ndarray], torch.Tensor],
    ) -> Copies | None:
        """``begins``: of each chunk, the first row. ``tensor`` makes one of an array."""
        source, target, row = [], [], []
        for chunk, begin in zip(chunks, begins.tolist(), strict=True):
            unit = chunk.unit
            if not unit.copied or chunk.begin != unit.first_computed:
                continue
            target.append(table.slots(places[unit], unit.start, unit.first_computed, page_size))
            row.append(np.full(unit.copied, begin))
            pieces, end, below = [], unit.first_computed, unit.base
            while end > unit.start:  # what the unit below has copied is copied from where it was computed
                assert below is not None
                first = min(max(unit.start, below.first_computed), end)
                pieces.append(table.slots(places[below], first, end, page_size))
                end, below = first, below.base
            source += pieces[::-1]
        if not row:
            return None
        return Copies(tensor(np.concatenate(source)), tensor(np.concatenate(target)), np.concatenate(row))

    def to(self, device: torch.device) -> Copies:
        return replace(self, source=sent(self.source, device), target=sent(self.target, device))

    def of_rows(self, begin: int, end: int) -> Copies | None:
        """Those that are read by the rows [begin, end), and by none before."""
        mine = np.flatnonzero((self.row >= begin) & (self.row < end))
        if not len(mine):
            return None
        which = torch.from_numpy(mine).to(self.source.device)
        return Copies(self.source[which], self.target[which], self.row[mine])

    def run(self, cache: torch.Tensor) -> None:
        """cache: [slots, heads, dim], K or V of a layer."""
        cache.index_copy_(0, self.target, cache.index_select(0, self.source))


@dataclass(frozen=True)
class AttentionBatch:
    """What attention needs to know of a step. All but the slots stays on the host.

    A span is a run of tokens of one unit: the decode rows, then the chunks. Neighbours in the plan are neighbours here.
    """

    slots: torch.Tensor  # [tokens]  where each token's K and V are written
    positions: np.ndarray  # [tokens]
    units: UnitTable
    span_unit: np.ndarray  # [spans]  and the fields of ``Span`` that follow it
    span_begin: np.ndarray  # [spans]
    span_end: np.ndarray  # [spans]
    span_position: np.ndarray  # [spans]
    rows: int  # how many of the tokens are decode rows; each is a span, unless a draft goes on from it
    page_size: int
    # [spans]  tokens that a row gains while the batch is run again, if all spans are decode rows; None: it runs once
    growth: np.ndarray | None = None
    two_way: TwoWay | None = None  # only if some token sees further than to itself
    copies: Copies | None = None  # K and V to be copied, in each layer, once those of the step are written

    def sees_to(self, window: int | None) -> np.ndarray | None:
        """How far each token sees in layers with this window. None: what is before it, and itself."""
        if self.two_way is None or (self.two_way.only_with_window and window is None):
            return None
        return self.two_way.sees_to

    @cached_property
    def has_two_way(self) -> np.ndarray:  # [spans] bool
        """Which spans have tokens that see further than to themselves."""
        if self.two_way is None:
            return np.zeros(len(self.span_begin), dtype=bool)
        further: np.ndarray = np.maximum.reduceat(self.two_way.sees_to - self.positions, self.span_begin) > 1
        return further

    def in_room(self, drafts: DraftRows) -> AttentionBatch:
        """With all rows that there is room for, and for as many positions: what is read by these holds for many steps.

        Slots stay those of the rows that are not idle.
        """
        room, which = drafts.room, drafts.which
        if room is None:
            return self
        rows, begin = room.rows[which], room.begin[which]
        nth = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows)
        positions = np.zeros(room.total, dtype=np.int64)
        positions[np.repeat(begin, rows) + nth] = np.repeat(self.span_position, rows) + nth
        growth = room.ends[which] - self.span_position - rows
        return replace(
            self, positions=positions, span_begin=begin, span_end=begin + rows, rows=room.total, growth=growth
        )

    def row_by_row(self) -> AttentionBatch:
        """The same with each decode row as a span of its own, also those of a draft."""
        decode = int(np.searchsorted(self.span_begin, self.rows))  # spans
        if decode == self.rows:
            return self
        sizes = (self.span_end - self.span_begin)[:decode]
        each = np.arange(self.rows)
        of_rows = np.repeat(self.span_unit[:decode], sizes), each, each + 1, self.positions[: self.rows]
        columns = self.span_unit, self.span_begin, self.span_end, self.span_position
        unit, begin, end, position = (
            np.concatenate([one, other[decode:]]) for one, other in zip(of_rows, columns, strict=True)
        )
        return replace(self, span_unit=unit, span_begin=begin, span_end=end, span_position=position)

    @cached_property
    def spans(self) -> list[Span]:
        """The spans as objects, for what looks at them one by one."""
        columns = self.span_unit, self.span_begin, self.span_end, self.span_position
        return [Span(*numbers) for numbers in zip(*(column.tolist() for column in columns), strict=True)]

    def to(self, device: torch.device) -> AttentionBatch:
        copies = None if self.copies is None else self.copies.to(device)
        return replace(self, slots=sent(self.slots, device), copies=copies)


@dataclass(frozen=True)
class Burst:
    """What has to be known beforehand where decode rows run several times without the host."""

    times: int
    left: np.ndarray  # [rows]  new tokens that each row may still have
    start: np.ndarray  # [rows]  position of the first token in the first of ``pages``
    pages: np.ndarray  # [rows, pages]  to which the row writes; -1 for none

    @staticmethod
    def of(
        left: np.ndarray,
        times: int,
        table: UnitTable,
        units: np.ndarray,  # [rows]  each row's in the table
        positions: np.ndarray,  # [rows]
        page_size: int,
        most_pages: int,  # of a row
    ) -> Burst:
        starts = np.array(table.start)[units]
        first = (positions - starts) // page_size
        places = (table.page_begin[units] + first)[:, None] + np.arange(most_pages)  # [rows, pages]
        there = places < table.page_begin[units + 1][:, None]
        pages = np.where(there, table.page[np.where(there, places, 0)], -1)
        return Burst(times, left, starts + first * page_size, pages)


@dataclass(frozen=True)
class ModelBatch:
    tokens: TokenBatch
    attention: AttentionBatch
    burst: Burst | None = None  # only if the builder makes bursts, and all tokens are decode rows
    asked: list[Chunk] = field(default_factory=list)  # parts of chunks; the logits of all their tokens are wanted
    states: StateBatch | None = None  # only if the model has layers that carry a state
    image_keys: np.ndarray | None = None  # [tokens]  as ``Prompt.keys``; only if the step has tokens of images
    drafted: int = 0  # tokens of drafts, whose logits come behind those that are sampled
    draft_rows: DraftRows | None = None  # where drafts are rows
    first_in_room: AttentionBatch | None = None  # where they have room: what its lists are made of

    def to(self, device: torch.device) -> ModelBatch:
        return replace(self, tokens=self.tokens.to(device), attention=self.attention.to(device))


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Only CUDA waits for memory that is not pinned. Elsewhere such a copy may read it when it holds something else.
    return tensor.to(device, non_blocking=device.type == "cuda")
