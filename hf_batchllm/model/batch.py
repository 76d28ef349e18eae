"""BatchBuilder: a Step in, one ModelBatch out. Tokens for the model and metadata for attention stay apart.

Everything is packed: the tokens of all units stand in one row, decode rows first. Work is done for each unit, never
for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from ..planning.step import Chunk, Step
from ..planning.units import Request, Unit, units_below


@dataclass(frozen=True)
class TokenBatch:
    """What the model is called with."""

    input_ids: torch.Tensor  # [tokens]
    position_ids: torch.Tensor  # [tokens]
    logits_rows: torch.Tensor  # [samples + asked]  the tokens whose output is sampled, then those asked for beside
    row_seats: torch.Tensor  # [rows]  where the device keeps the last tokens of the decode rows
    sample_seats: torch.Tensor  # [samples]  and where it puts those that are sampled
    made: torch.Tensor  # [samples]  new tokens that their requests have had so far

    def to(self, device: torch.device) -> TokenBatch:
        return TokenBatch(*(_move(getattr(self, field.name), device) for field in fields(self)))


@dataclass(frozen=True)
class UnitTable:
    """The units that a step reads or writes; a base stands before what stands on it."""

    base: list[int]  # [units]  index of the unit below, -1 for none
    start: list[int]  # [units]  position of a unit's first token, which is also how far it reads of its base
    pages: list[np.ndarray]  # [units] of [pages]  page i holds the positions from start + i * page_size

    def slots(self, unit: int, begin: int, end: int, page_size: int) -> np.ndarray:
        """Where the tokens at positions ``[begin, end)`` of a unit lie in the cache, seen as one row of slots."""
        offsets = np.arange(begin - self.start[unit], end - self.start[unit])
        return self.pages[unit][offsets // page_size] * page_size + offsets % page_size


@dataclass(frozen=True)
class Span:
    """A run of tokens of one unit in the batch: a decode row, or a chunk of a prompt."""

    unit: int
    begin: int  # its tokens in the batch are [begin, end)
    end: int
    position: int  # of its first token


@dataclass(frozen=True)
class AttentionBatch:
    """What attention needs to know of a step. Lists are small (one entry for each unit) and stay on the host."""

    slots: torch.Tensor  # [tokens]  where each token's K and V are written
    positions: np.ndarray  # [tokens]
    units: UnitTable
    spans: list[Span]  # the decode rows, then the chunks; neighbours in the plan are neighbours here
    rows: int  # how many of the spans, and of the tokens, are decode rows
    page_size: int
    growth: np.ndarray | None = None  # [rows]  by how much a row grows while this holds; None: it runs once

    def to(self, device: torch.device) -> AttentionBatch:
        return replace(self, slots=_move(self.slots, device))


@dataclass(frozen=True)
class Burst:
    """What decode rows that run several times have to know beforehand."""

    times: int
    left: np.ndarray  # [rows]  new tokens that each may still have
    start: np.ndarray  # [rows]  the position at which the first of these pages begins
    pages: np.ndarray  # [rows, few]  those that it writes to; -1 for none


@dataclass(frozen=True)
class ModelBatch:
    tokens: TokenBatch
    attention: AttentionBatch
    burst: Burst | None = None  # where all are decode rows, if the builder was asked for it
    asked: list[Chunk] = field(default_factory=list)  # parts of chunks, the logits of whose every token are wanted

    def to(self, device: torch.device) -> ModelBatch:
        return replace(self, tokens=self.tokens.to(device), attention=self.attention.to(device))


class BatchBuilder:
    """``most_times``: how often decode rows may run in a row; 0 where there is nothing to do so.

    ``wanted`` gives the parts of a chunk whose logits are asked for, sampled or not.
    """

    def __init__(
        self,
        page_size: int,
        pin_memory: bool = False,
        short_chunk: int = 0,
        most_times: int = 0,
        wanted: Callable[[Chunk], Sequence[Chunk]] | None = None,
    ) -> None:
        self.page_size = page_size
        self.most_times = most_times
        self.short_chunk = short_chunk  # chunks of no more tokens stand before longer ones
        self.pin_memory = pin_memory
        self.wanted = wanted

    def build(self, step: Step) -> ModelBatch:
        # Stable: neighbours in the plan stay neighbours.
        chunks = sorted(step.chunks, key=lambda chunk: chunk.end - chunk.begin > self.short_chunk)
        units = units_below([*step.rows, *(chunk.unit for chunk in chunks)])
        place = {unit: index for index, unit in enumerate(units)}
        table = UnitTable(
            base=[place[unit.base] if unit.base is not None else -1 for unit in units],
            start=[unit.start for unit in units],
            pages=[np.array(unit.pages, dtype=np.int64) for unit in units],
        )
        rows = len(step.rows)
        spans, ids, positions, slots = self._rows(step.rows, place)
        last = {}  # the place of each chunk's last token
        asked: dict[Chunk, int] = {}  # and the place of its first token
        token = rows
        for chunk in chunks:
            begin, token = token, token + chunk.end - chunk.begin
            spans.append(Span(place[chunk.unit], begin, token, chunk.begin))
            ids.append(chunk.unit.tokens(chunk.begin, chunk.end))
            positions.append(np.arange(chunk.begin, chunk.end))
            slots.append(table.slots(place[chunk.unit], chunk.begin, chunk.end, self.page_size))
            last[chunk] = token - 1
            for part in self.wanted(chunk) if self.wanted is not None else ():
                asked[part] = begin + part.begin - chunk.begin
        logits_rows = [*range(rows), *(last[chunk] for chunk in step.chunks if chunk.samples)]
        for part, first in asked.items():
            logits_rows += range(first, first + part.end - part.begin)
        every_position = np.concatenate(positions)
        burst = None if chunks or not self.most_times else self._burst(step)
        # What rows run by lies in the device's own memory already, so these stay here.
        tensor = self._tensor if burst is None else _plain
        return ModelBatch(
            TokenBatch(
                tensor(np.concatenate(ids)),
                tensor(every_position),
                tensor(np.array(logits_rows)),
                tensor(np.array([request.seat for request in step.rows])),
                tensor(np.array([request.seat for request in step.sampling()])),
                tensor(np.array([request.made for request in step.sampling()])),
            ),
            AttentionBatch(
                tensor(np.concatenate(slots)),
                every_position,
                table,
                spans,
                rows,
                self.page_size,
                None if burst is None else np.minimum(burst.times, burst.left) - 1,
            ),
            burst,
            list(asked),
        )

    def _burst(self, step: Step) -> Burst:
        few = (self.most_times - 1) // self.page_size + 2
        pages = np.full((len(step.rows), few), -1, dtype=np.int64)
        start, left = [], []
        for row, request in enumerate(step.rows):
            first = (request.length - 1 - request.start) // self.page_size
            own = request.pages[first : first + few]
            pages[row, : len(own)] = own
            start.append(request.start + first * self.page_size)
            left.append(request.max_new_tokens - request.made)
        return Burst(step.times, np.array(left), np.array(start), pages)

    def _rows(
        self, rows: list[Request], place: dict[Unit, int]
    ) -> tuple[list[Span], list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """Spans, ids, positions and slots of the decode rows. There are many, of one token each: plain numbers do."""
        spans, ids, positions, slots = [], [], [], []
        for row, request in enumerate(rows):
            position = request.length - 1
            page, at = divmod(position - request.start, self.page_size)
            spans.append(Span(place[request], row, row + 1, position))
            ids.append(0 if request.pending else request.generated[-1])  # if pending, the device has it
            positions.append(position)
            slots.append(request.pages[page] * self.page_size + at)
        return spans, *([np.array(values, dtype=np.int64)] for values in (ids, positions, slots))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = _plain(array)
        return tensor.pin_memory() if self.pin_memory else tensor


def _plain(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, non_blocking=True)
