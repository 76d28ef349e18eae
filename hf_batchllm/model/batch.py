"""BatchBuilder: a Step in, one ModelBatch out. Tokens for the model and metadata for attention stay apart.

Everything is packed: the tokens of all units stand in one row, decode rows first. Python loops run over units, never
over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from ..planning.requests_and_prefixes import Prefix, Request, Unit, units_below
from ..planning.step import Chunk, Step


@dataclass(frozen=True)
class TokenBatch:
    """What the model is called with."""

    input_ids: torch.Tensor  # [tokens]
    position_ids: torch.Tensor  # [tokens]
    logits_rows: torch.Tensor  # [samples + asked]  tokens whose logits are sampled, then tokens of ``ModelBatch.asked``
    row_seats: torch.Tensor  # [rows]  where the device keeps the last token of each decode row
    sample_seats: torch.Tensor  # [samples]  where the device puts each sampled token
    made: torch.Tensor  # [samples]  new tokens that each sampled request has had so far

    def to(self, device: torch.device) -> TokenBatch:
        return TokenBatch(*(_sent(getattr(self, field.name), device) for field in fields(self)))


@dataclass(frozen=True)
class UnitTable:
    """The units that a step reads or writes; each stands behind the unit it is built on."""

    base: list[int]  # [units]  index of the unit below, -1 for none
    start: list[int]  # [units]  position of a unit's first token; of its base it reads the positions before
    pages: list[np.ndarray]  # [units] of [pages]  page i holds the positions from start + i * page_size

    def slots(self, unit: int, begin: int, end: int, page_size: int) -> np.ndarray:
        """The slots of a unit's tokens at positions ``[begin, end)``; page ``p`` begins with slot ``p * page_size``."""
        offsets = np.arange(begin - self.start[unit], end - self.start[unit])
        return self.pages[unit][offsets // page_size] * page_size + offsets % page_size


@dataclass(frozen=True)
class Span:
    """A run of tokens of one unit in the batch: a decode row, or a chunk of a prompt."""

    unit: int
    begin: int  # its tokens in the batch are [begin, end)
    end: int
    position: int  # in the unit's sequence, of its first token


@dataclass(frozen=True)
class AttentionBatch:
    """What attention needs to know of a step. Lists have one entry for each unit, and stay on the host."""

    slots: torch.Tensor  # [tokens]  where each token's K and V are written
    positions: np.ndarray  # [tokens]
    units: UnitTable
    spans: list[Span]  # the decode rows, then the chunks; neighbours in the plan are neighbours here
    rows: int  # how many of the spans, and of the tokens, are decode rows
    page_size: int
    growth: np.ndarray | None = None  # [rows]  tokens that a row gains while the batch is run again; None: it runs once

    def to(self, device: torch.device) -> AttentionBatch:
        return replace(self, slots=_sent(self.slots, device))


@dataclass(frozen=True)
class Burst:
    """What has to be known beforehand where decode rows run several times without the host."""

    times: int
    left: np.ndarray  # [rows]  new tokens that each row may still have
    start: np.ndarray  # [rows]  position of the first token in the first of ``pages``
    pages: np.ndarray  # [rows, pages]  to which the row writes; -1 for none


@dataclass(frozen=True)
class ModelBatch:
    tokens: TokenBatch
    attention: AttentionBatch
    burst: Burst | None = None  # only if the builder makes bursts, and all tokens are decode rows
    asked: list[Chunk] = field(default_factory=list)  # parts of chunks; the logits of all their tokens are wanted

    def to(self, device: torch.device) -> ModelBatch:
        return replace(self, tokens=self.tokens.to(device), attention=self.attention.to(device))


class BatchBuilder:
    """Builds the batch of each step.

    ``pin_memory``: on the host, for a copy to a GPU that the host does not wait for.
    ``most_times``: how many times decode rows may run without the host in between; 0: no bursts are made.
    ``wanted``: gives the parts of a chunk whose logits are asked for, sampled or not.
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
        self.short_chunk = short_chunk  # tokens: chunks of no more than these stand before longer ones
        self.pin_memory = pin_memory
        self.wanted = wanted
        self.built_prefixes = False  # whether there were prefixes in a batch; set back by the reader

    def build(self, step: Step) -> ModelBatch:
        # Stable: neighbours in the plan stay neighbours.
        chunks = sorted(step.chunks, key=lambda chunk: chunk.end - chunk.begin > self.short_chunk)
        self.built_prefixes |= any(isinstance(chunk.unit, Prefix) for chunk in chunks)
        units = units_below([*step.rows, *(chunk.unit for chunk in chunks)])
        place = {unit: index for index, unit in enumerate(units)}
        table = UnitTable(
            base=[place[unit.base] if unit.base is not None else -1 for unit in units],
            start=[unit.start for unit in units],
            pages=[np.array(unit.pages, dtype=np.int64) for unit in units],
        )
        rows = len(step.rows)
        spans, ids, positions, slots = self._rows(step.rows, place)
        last: dict[Chunk, int] = {}  # the place of each chunk's last token
        asked: dict[Chunk, int] = {}  # the place of each part's first token
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
        # Of a burst the device has its own copy, and is sent what it lacks by ``DecodeRows``: these stay on the host.
        tensor = _pinned if self.pin_memory and burst is None else _unpinned
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
        most_pages = (self.most_times - 1) // self.page_size + 2  # of one row; it may start at a page's last token
        pages = np.full((len(step.rows), most_pages), -1, dtype=np.int64)
        start, left = [], []
        for row, request in enumerate(step.rows):
            first = (request.length - 1 - request.start) // self.page_size
            own = request.pages[first : first + most_pages]
            pages[row, : len(own)] = own
            start.append(request.start + first * self.page_size)
            left.append(request.max_new_tokens - request.made)
        return Burst(step.times, np.array(left), np.array(start), pages)

    def _rows(
        self, rows: list[Request], place: dict[Unit, int]
    ) -> tuple[list[Span], list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """Spans, ids, positions and slots of the decode rows.

        There are many of them, of one token each. Plain numbers are faster here than a small array for each.
        """
        spans, ids, positions, slots = [], [], [], []
        for row, request in enumerate(rows):
            position = request.length - 1
            page, offset = divmod(position - request.start, self.page_size)
            spans.append(Span(place[request], row, row + 1, position))
            ids.append(0 if request.pending else request.generated[-1])  # a pending one is known to the device alone
            positions.append(position)
            slots.append(request.pages[page] * self.page_size + offset)
        return spans, [np.array(ids, np.int64)], [np.array(positions, np.int64)], [np.array(slots, np.int64)]


def _unpinned(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))


def _pinned(array: np.ndarray) -> torch.Tensor:
    return _unpinned(array).pin_memory()


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, non_blocking=True)
