"""The batches of steps with drafts in one room. What stays the same is taken from the first of them.

The device waits while such a batch is built, so it is built in as few operations as will do.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ..planning.draft_room import DraftRoom
from ..planning.step import Step
from .batch import Burst, ModelBatch, TokenBatch
from .draft_rows import DraftRows


class RoomBatches:
    """first: the batch of ``step``, the first in its room."""

    def __init__(self, step: Step, first: ModelBatch) -> None:
        assert step.room is not None and first.burst is not None and first.draft_rows is not None
        self.room: DraftRoom = step.room
        self._lists = first.attention.in_room(first.draft_rows)
        self.first = replace(first, first_in_room=self._lists)
        self._table = first.attention.units
        self._unit = first.attention.span_unit  # [requests of the room], as are the next three
        requests = list(self.room.place)
        self._prompt = np.array([request.prompt_tokens for request in requests], dtype=np.int64)
        self._seat = np.array([request.seat for request in requests], dtype=np.int64)
        self._most = np.array([request.max_new_tokens for request in requests], dtype=np.int64)
        self._most_pages = first.burst.pages.shape[1]

    def batch(self, step: Step) -> ModelBatch:
        first, drafts = self.first, DraftRows.of(step)
        which, rows = drafts.which, len(drafts.ids)
        made = np.array([len(request.generated) for request in step.rows], dtype=np.int64)  # and all have been seen
        of_row = np.repeat(which, drafts.counts)
        first_position = self._prompt[which] + made - 1
        made, positions = drafts.of_each_row(made) + drafts.nth, drafts.of_each_row(first_position) + drafts.nth
        page_size, unit = first.attention.page_size, self._unit[of_row]
        burst = Burst.of(self._most[of_row] - made, 1, self._table, unit, positions, page_size, self._most_pages)
        seats = torch.from_numpy(self._seat[of_row])
        end = np.cumsum(drafts.counts)
        tokens = TokenBatch(
            torch.from_numpy(drafts.ids),
            torch.from_numpy(positions),
            torch.arange(rows, device="cpu"),
            seats,
            seats,
            torch.from_numpy(made),
        )
        attention = replace(
            first.attention,
            slots=torch.from_numpy(self._table.slots_of_each(unit, positions, page_size)),
            positions=positions,
            span_unit=self._unit[which],
            span_begin=end - drafts.counts,
            span_end=end,
            span_position=first_position,
            rows=rows,
        )
        return ModelBatch(tokens, attention, burst, draft_rows=drafts, first_in_room=self._lists)
