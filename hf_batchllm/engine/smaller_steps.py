"""When a step runs out of memory: it runs again in smaller parts, and later steps are smaller.

A step that failed half-way has changed little. It has written some K and V, which its parts write again to the same
places. What else it may have changed is put back by the loop (``put_back``), once all earlier steps have been seen. The
scheduler is not asked meanwhile: to it, the parts together are the step that it made.
"""

from __future__ import annotations

import gc
import traceback
from collections import deque
from collections.abc import Callable

import torch

from ..errors import BatchLLMError
from ..model.device_memory import device_memory, is_out_of_memory
from ..notices import Notices
from ..planning.base_scheduler import BaseScheduler
from ..planning.requests_and_prefixes import Request, Unit
from ..planning.step import Chunk, Step

_CALM = 64  # steps without a failure until they may be twice as large; twice as many after each further failure


class SmallerSteps:
    """``most``: the most tokens of a step since one ran out of memory; None before that.

    ``carries_states``: whether the model has layers that carry a state from token to token. A step that failed half-way
    has moved some of them on, so it is not run again. And a unit does not run beside the one whose state it begins
    with: the schedulers here see to that, others need not.

    ``alone``: whether no other process has a part of the model. Others are in the midst of a step that one has no
    memory for, so it cannot run again.
    """

    def __init__(
        self,
        scheduler: BaseScheduler,
        device: torch.device,
        page_size: int,
        notices: Notices,
        carries_states: bool = False,
        alone: bool = True,
    ) -> None:
        self._alone = alone
        self._carries_states = carries_states
        self._scheduler = scheduler
        self._device = device
        self._page_size = page_size
        self._notices = notices
        self._parts: deque[Step] = deque()
        self._failed: Step | None = None  # whose state has to be put back before anything else runs
        self._tried: list[int] = []  # tokens of the steps that failed one after the other
        self._largest = 0  # tokens of the largest step that failed
        self._failures = 0
        self._calm = 0  # steps since the last failure
        self.most: int | None = None

    @property
    def waiting(self) -> bool:
        """Whether parts of a step have yet to run: they come before the scheduler's next step."""
        return bool(self._parts)

    def cut(self, step: Step) -> bool:
        """Take a step of the scheduler that is too large, or cannot run as one. Its parts wait."""
        parts = apart(step) if self._carries_states and len(step.chunks) > 1 else [step]
        if len(parts) == 1 and (self.most is None or step.tokens <= self.most):
            return False
        self._parts.extend(parts)
        return True

    def next(self, put_back: Callable[[Step], None]) -> Step | None:
        """The next part, all earlier steps having been seen; None if the requests of all parts have ended."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            gc.collect()  # frames and tensors that hold each other
            device_memory(self._device).trim()
            put_back(failed)
        while self._parts:
            part = self._still_to_run(self._parts.popleft())
            smaller = [part] if self.most is None or part.tokens <= self.most else parts_of(part, self.most)
            if len(smaller) > 1:
                self._parts.extendleft(reversed(smaller))
            elif part.tokens:
                return part
            elif self._parts:  # states that its rows were not alone to read
                self._parts[0].copies[:0] = part.copies
        return None

    def takes(self, error: Exception, step: Step, may_repeat: Callable[[], bool]) -> bool:
        """Whether ``step``, which ended with ``error``, is run again. ``may_repeat``: asked where memory ran out."""
        if not is_out_of_memory(error) or isinstance(error, BatchLLMError):
            return False
        why_not = "a logits processor that may keep state had been called" if not may_repeat() else ""
        if step.instead is not None and not why_not:
            traceback.clear_frames(error.__traceback__)  # they hold tensors of the step
            self._failed = step.instead()
            self._parts.appendleft(self._failed)
            return True
        if self._carries_states:
            why_not = "layers of this model carry a state from token to token, and some of them had moved on"
        if not self._alone:
            why_not = "other processes run this model together with this one, and are in the midst of the step"
        if why_not:
            error.add_note(
                f"The step cannot be run again in smaller parts: {why_not}. Set a smaller `max_batch_tokens` or "
                "`kv_memory`"
            )
            return False
        self._tried.append(step.tokens)
        if self._tried[-2:-1] == [step.tokens]:  # one token, or an image that is not to be cut
            tried = ", ".join(f"{tokens:,}" for tokens in dict.fromkeys(self._tried))
            error.add_note(
                f"Steps of fewer and fewer tokens were tried ({tried}), and none fits into the memory that is left on "
                f"{self._device}: set a smaller `kv_memory`, or free what else is there"
            )
            return False
        traceback.clear_frames(error.__traceback__)  # they hold tensors of the step
        self._parts.appendleft(step)
        self._failed = step
        self._failures += 1
        self._calm = 0
        self._largest = max(self._largest, step.tokens)
        smaller = max(1, step.tokens // 2)  # of an image that is not to be cut, it may be more than before
        self.most = smaller if self.most is None else min(self.most, smaller)
        self._scheduler.limit_steps(self.most)
        self._notices(
            "smaller steps",
            f"a step of {step.tokens:,} tokens ran out of memory on {self._device}: it is run again in smaller parts, "
            "and later steps are smaller. The results stay the same. For larger steps set a smaller `kv_memory`, or "
            "free what else is there; to have steps fit from the start, set a smaller `max_batch_tokens`",
        )
        return True

    def ran(self) -> None:
        """A step has been launched. After many of them steps may grow again: others may have given memory back."""
        if self.most is None:
            return
        self._tried.clear()
        self._calm += 1
        if self._calm < _CALM << self._failures:
            return
        self._calm = 0
        self.most = None if 2 * self.most >= self._largest else 2 * self.most
        self._scheduler.limit_steps(self.most)

    def _still_to_run(self, step: Step) -> Step:
        """The step without requests that have ended since it was made."""
        return Step(
            [request for request in step.rows if not request.done],
            [chunk for chunk in step.chunks if self._is_needed(chunk)],
            step.times,
            step.copies,
        )

    def _is_needed(self, chunk: Chunk) -> bool:
        unit = chunk.unit
        if isinstance(unit, Request) and unit.done:
            return False
        return unit.start + len(unit.pages) * self._page_size >= chunk.end  # else it has left the cache


def apart(step: Step) -> list[Step]:
    """``step`` in parts, in its order, so that no unit runs beside the one whose state it begins with."""
    parts, units = [Step(rows=step.rows, times=step.times, copies=step.copies)], set[Unit]()
    for chunk in step.chunks:
        goes_on = chunk.begin > chunk.unit.start
        if (chunk.unit if goes_on else chunk.unit.state_source) in units:
            parts.append(Step(times=step.times))
            units = set()
        parts[-1].chunks.append(chunk)
        units.add(chunk.unit)
    return parts if len(parts) > 1 else [step]


def parts_of(step: Step, most: int) -> list[Step]:
    """``step`` in parts of at most ``most`` tokens, in its order: a prefix comes before the units on it.

    An image whose tokens see each other both ways is not cut, whatever its size.
    """
    parts: list[Step] = []
    room = 0

    def part() -> Step:
        nonlocal room
        if not room:
            parts.append(Step(times=step.times))
            room = most
        return parts[-1]

    for request in step.rows:
        part().rows.append(request)
        room -= 1
    for chunk in step.chunks:
        begin = chunk.begin
        while begin < chunk.end:
            into = part()
            end = chunk.unit.chunk_end(begin, min(chunk.end, begin + room))
            if end == begin:  # an image that is not to be cut: it comes into a part of its own
                if into.tokens:
                    room = 0
                    continue
                end = chunk.unit.shortest_chunk_end(begin)
            into.chunks.append(Chunk(chunk.unit, begin, end))
            room = max(0, room - (end - begin))
            begin = end
    parts[0].copies = step.copies  # all states are copied before any of them moves on
    return parts
