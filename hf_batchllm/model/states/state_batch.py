"""What layers that carry a state need to know of a step: where each run of tokens goes on, and where it leaves off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...kernels.lists.spans import Spans
from ...planning.requests_and_prefixes import NO_SLOT, Branch, Unit
from ...planning.step import Chunk, Step


@dataclass(frozen=True)
class StateBatch:
    """The spans of a step: tokens of each, the slot of the state that it begins with, and the slot that it leaves."""

    lengths: np.ndarray  # [spans]
    source: np.ndarray  # [spans]  NO_SLOT: nothing came before
    target: np.ndarray  # [spans]  NO_SLOT: the state is not kept
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target) slots; made before the spans run

    @classmethod
    def of(cls, step: Step, chunks: Sequence[Chunk], lengths: np.ndarray) -> StateBatch:
        """``chunks``: those of the step, in the order in which they stand in the batch."""
        rows = [request.slot for request in step.rows]
        target = rows + [chunk.unit.slot for chunk in chunks]
        if step.rows and isinstance(step.rows[0], Branch):  # then all are: their first own token may be a row
            rows = [source_slot(request, request.length - 1) for request in step.rows]
        source = rows + [source_slot(chunk.unit, chunk.begin) for chunk in chunks]
        return cls(lengths, np.array(source, dtype=np.int64), np.array(target, dtype=np.int64), step.copies)

    @property
    def handed_on(self) -> int:
        """Spans that begin with the state of another unit."""
        return int(((self.source != self.target) & (self.source != NO_SLOT)).sum())

    def spans(self, device: torch.device) -> Spans:
        return Spans.of(self.lengths, self.source, self.target, device)


def source_slot(unit: Unit, begin: int) -> int:
    """Where the state before a unit's token is: in its own slot, or in that of the unit that it stands on."""
    if begin > unit.start or (isinstance(unit, Branch) and unit.parted_from is not None):  # it has been copied
        return unit.slot
    below = unit.state_source
    return NO_SLOT if below is None else below.slot
