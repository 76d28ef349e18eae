"""BatchBuilder: a Step in, one ModelBatch out.

Python loops run over units, never over tokens, and take from each what arrays are then made of: there are thousands of
units in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from ..inputs.images.prompt_images import FIRST_KEY
from ..planning.requests_and_prefixes import Request, places_below
from ..planning.step import Chunk, Step
from .batch import AttentionBatch, Burst, Copies, ModelBatch, TokenBatch, TwoWay, UnitTable
from .draft_rows import DraftRows
from .room_batches import RoomBatches
from .states.state_batch import StateBatch


class BatchBuilder:
    """Builds the batch of each step.

    ``pin_memory``: on the host, for a copy to a GPU that the host does not wait for.
    ``most_times``: how many times decode rows may run without the host in between; 0: no bursts are made.
    ``carries_states``: whether the model has layers that carry a state from token to token.
    ``wanted``: gives the parts of a chunk whose logits are asked for, sampled or not.
    ``placeholder``: the id of tokens that images take; None where no prompt has any.
    ``two_way``: as ``ImageModel`` has it.
    """

    def __init__(
        self,
        page_size: int,
        pin_memory: bool = False,
        short_chunk: int = 0,
        most_times: int = 0,
        wanted: Callable[[Chunk], Sequence[Chunk]] | None = None,
        carries_states: bool = False,
        placeholder: int | None = None,
        two_way: str | None = None,
    ) -> None:
        self.placeholder = placeholder
        self.two_way = two_way
        self.page_size = page_size
        self.carries_states = carries_states
        self.most_times = most_times
        self.short_chunk = short_chunk  # tokens: chunks of no more than these stand before longer ones
        self.pin_memory = pin_memory
        self.wanted = wanted
        self.states_handed_on = 0  # runs of tokens that began with the state of another unit
        self._in_room: RoomBatches | None = None  # where the latest step with drafts was

    def build(self, step: Step) -> ModelBatch:
        known = self._in_room
        if known is not None and step.room is known.room:
            return known.batch(step)
        self._in_room = None
        if step.room is None:
            return self._build(step)
        if step.rows != list(step.room.place) or not self.most_times or self.placeholder is not None:
            # Its lists would be made of other rows than it has, or not be kept.
            return self._build(replace(step, room=None))
        batch = self._build(step)
        self._in_room = RoomBatches(step, batch)
        return self._in_room.first

    def _build(self, step: Step) -> ModelBatch:
        drafts = DraftRows.of(step) if step.in_rows else None
        rows, count = len(step.rows) if drafts is None else len(drafts.ids), len(step.chunks)
        # Short chunks first, otherwise in their order: neighbours in the plan stay neighbours.
        order = sorted(range(count), key=lambda index: self._is_long(step.chunks[index]))
        chunks = [step.chunks[index] for index in order]
        places = places_below([*step.rows, *(chunk.unit for chunk in chunks)])
        table = UnitTable.of(places)
        row_ids, row_positions, row_made, row_seats, row_most = self._rows(step.rows)
        if drafts is not None:  # the rows of a request stand one behind the other
            row_ids, row_seats, row_most = drafts.ids, drafts.of_each_row(row_seats), drafts.of_each_row(row_most)
            row_positions = drafts.of_each_row(row_positions) + drafts.nth
            row_made = drafts.of_each_row(row_made) + drafts.nth
        chunk_begin = np.array([chunk.begin for chunk in chunks], dtype=np.int64)
        chunk_end = np.array([chunk.end for chunk in chunks], dtype=np.int64)
        # The rows of a request with a draft are one span: its K and V are read once for all of them.
        first = np.arange(rows) if drafts is None else np.flatnonzero(drafts.nth == 0)
        span_unit = np.array([places[unit] for unit in chain(step.rows, (chunk.unit for chunk in chunks))])
        span_position = np.concatenate([row_positions[first], chunk_begin])
        sizes = np.concatenate([np.diff(np.append(first, rows)), chunk_end - chunk_begin])
        span_end = np.cumsum(sizes)
        span_begin = span_end - sizes
        every_position = np.arange(int(sizes.sum())) + np.repeat(span_position - span_begin, sizes)
        slots = table.slots_of_each(np.repeat(span_unit, sizes), every_position, self.page_size)
        ids = np.concatenate([row_ids, *(chunk.ids() for chunk in chunks)])
        ids, image_keys = self._without_keys(ids)
        drafted = np.array([len(chunk.draft) for chunk in step.chunks], dtype=np.int64)
        last = np.empty(count, dtype=np.int64)  # the place of each chunk's last known token, in the order of the step
        last[order] = span_end[rows:] - 1
        last -= drafted
        sampling = [index for index, chunk in enumerate(step.chunks) if chunk.samples]
        asked: dict[Chunk, int] = {}  # the place of each part's first token
        if self.wanted is not None:
            for chunk, begin in zip(chunks, span_begin[rows:].tolist(), strict=True):
                asked |= {part: begin + part.begin - chunk.begin for part in self.wanted(chunk)}
        of_asked = [np.arange(first, first + part.end - part.begin) for part, first in asked.items()]
        of_drafts = [last[index] + 1 + np.arange(drafted[index]) for index in np.flatnonzero(drafted)]
        logits_rows = np.concatenate([np.arange(rows), last[sampling], *of_drafts, *of_asked])
        sampling_chunks = step.sampling()[len(step.rows) :]
        made = np.concatenate([row_made, np.array([unit.made for unit in sampling_chunks], dtype=np.int64)])
        sample_seats = np.concatenate([row_seats, np.array([unit.seat for unit in sampling_chunks], dtype=np.int64)])
        burst = None
        if not chunks and self.most_times:
            most_pages = (self.most_times - 1) // self.page_size + 2  # of one row; it may start at a page's last token
            units, left = np.repeat(span_unit, sizes), row_most - row_made
            burst = Burst.of(left, step.times, table, units, row_positions, self.page_size, most_pages)
        states = StateBatch.of(step, chunks, sizes) if self.carries_states else None
        if states is not None:
            self.states_handed_on += states.handed_on
        # Of a burst the device has its own copy, and is sent what it lacks by ``DecodeRows``: these stay on the host.
        tensor = _pinned if self.pin_memory and burst is None else _unpinned
        return ModelBatch(
            TokenBatch(
                tensor(ids),
                tensor(every_position if self.placeholder is None else _for_rope(every_position, step, chunks, drafts)),
                tensor(logits_rows),
                tensor(row_seats),
                tensor(sample_seats),
                tensor(made),
            ),
            AttentionBatch(
                tensor(slots),
                every_position,
                table,
                span_unit,
                span_begin,
                span_end,
                span_position,
                rows,
                self.page_size,
                None if burst is None or drafts is not None else np.minimum(burst.times, burst.left) - 1,
                None if self.two_way is None else self._seen(every_position, rows, chunks),
                Copies.of(chunks, span_begin[rows:], table, places, self.page_size, tensor),
            ),
            burst,
            list(asked),
            states,
            image_keys,
            int(drafted.sum()),
            drafts,
        )

    def _is_long(self, chunk: Chunk) -> bool:
        return chunk.end - chunk.begin > self.short_chunk or chunk.unit.has_two_way(chunk.begin, chunk.end)

    def _seen(self, positions: np.ndarray, rows: int, chunks: Sequence[Chunk]) -> TwoWay | None:
        """``positions``: [tokens]; decode rows come first."""
        sees_to, further, begin = positions + 1, False, rows
        for chunk in chunks:
            unit, runs = chunk.unit, chunk.unit.two_way
            if runs is not None and unit.has_two_way(chunk.begin, chunk.end):
                if unit.chunk_end(chunk.begin, chunk.end) != chunk.end:
                    raise RuntimeError(
                        f"the scheduler ended a chunk at position {chunk.end}, inside of an image whose tokens see all "
                        "of it: ask `chunk.unit.chunk_end(begin, end)` where a chunk may end"
                    )
                for first, last in runs[(runs[:, 0] >= chunk.begin) & (runs[:, 1] <= chunk.end)].tolist():
                    sees_to[begin + first - chunk.begin : begin + last - chunk.begin] = last
                further = True
            begin += chunk.end - chunk.begin
        return TwoWay(sees_to, self.two_way == "layers with a window") if further else None

    def _without_keys(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The ids that the model takes, and ``ModelBatch.image_keys``."""
        if self.placeholder is None:
            return ids, None
        of_images = ids >= FIRST_KEY
        if not of_images.any():
            return ids, None
        return np.where(of_images, self.placeholder, ids), ids

    @staticmethod
    def _rows(rows: list[Request]) -> Iterable[np.ndarray]:  # five, [rows] each
        """Ids, positions, new tokens so far, seats, and the most new tokens of the decode rows.

        The id of a pending token is known to the device alone: 0.
        """
        ids = [0 if request.pending else request.generated[-1] for request in rows]
        made = np.array([len(request.generated) + request.pending for request in rows], dtype=np.int64)
        prompts = np.array([request.prompt_tokens for request in rows], dtype=np.int64)
        seats = np.array([request.seat for request in rows], dtype=np.int64)
        most = np.array([request.max_new_tokens for request in rows], dtype=np.int64)
        return np.array(ids, dtype=np.int64), prompts + made - 1, made, seats, most


def _for_rope(positions: np.ndarray, step: Step, chunks: Sequence[Chunk], drafts: DraftRows | None) -> np.ndarray:
    """Where the tokens stand for RoPE: [tokens], or [3, tokens] if there is a part of a prompt with images.

    In text all three places are the same.
    """
    behind = np.array([0 if each.places is None else each.places.behind for each in step.rows], dtype=positions.dtype)
    if drafts is not None:
        behind = drafts.of_each_row(behind)
    text = positions.copy()
    text[: len(behind)] += behind
    if all(chunk.unit.places is None for chunk in chunks):
        return text
    places = np.tile(text, (3, 1))
    begin = len(behind)
    for chunk in chunks:
        end = begin + chunk.end - chunk.begin
        if chunk.unit.places is not None:
            places[:, begin:end] = chunk.unit.places.at(chunk.begin, chunk.end)
        begin = end
    return places


def _unpinned(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))


def _pinned(array: np.ndarray) -> torch.Tensor:
    return _unpinned(array).pin_memory()
