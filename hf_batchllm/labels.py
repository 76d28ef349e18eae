"""Which segments of a plan save most, and how the text of each begins. No model and no torch."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .prompts import Prompt
    from .sharing import Segment, SharingPlan

LABELLED = 12  # segments: as many as a picture has room for
_TOKENS = 40  # of each, decoded
_CHARACTERS = 160


def saved_by(segment: Segment) -> int:
    """Tokens that need not be computed again, for all of its members but one."""
    return len(segment) * (segment.members - 1)


def largest_savers(plan: SharingPlan, count: int = LABELLED) -> list[Segment]:
    """The segments that save most, most first."""
    return heapq.nsmallest(count, plan.segments, key=lambda segment: (-saved_by(segment), segment.index))


def label_segments(plan: SharingPlan, prompts: Sequence[Prompt], decode: Callable[[list[int]], str | None]) -> None:
    """Fill in ``plan.labels``. ``prompts`` are those of the plan; ``decode`` gives None where there is no tokenizer.

    Labels are there to be looked at: what a tokenizer has against one costs the label and nothing else.
    """
    for segment in largest_savers(plan):
        end = min(segment.end, segment.start + _TOKENS)
        try:
            text = decode(prompts[segment.prompt].ids[segment.start : end].tolist())
        except Exception:
            continue
        if not isinstance(text, str):
            continue
        text = text.strip("\ufffd")[:_CHARACTERS]  # a character may go on in the tokens that were cut off
        if text.strip():
            plan.labels[segment.index] = text
