"""How much of the time a GPU had something to do while answers grew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from .device_time import spans_of

_LAST = 0.6  # of the decode part: graphs are captured at its beginning


@dataclass(frozen=True)
class Busy:
    share: float
    seconds: float  # that were looked at


def busy_share(device: torch.device, run: Callable[[], None], prompts_until: Callable[[], int]) -> Busy | None:
    """None where nobody keeps a record of what the device does. ``prompts_until``: when the prompts ended, in ns."""
    spans = [(span.start, span.end) for span in spans_of(device, run)]
    return share_of(np.array(spans, dtype=np.int64).reshape(-1, 2), prompts_until())


def share_of(spans: np.ndarray, prompts_until: int) -> Busy | None:  # [spans, 2]
    """The last part of the time after the prompts; of all the time, if the profiler's clock is not the wall's."""
    if not len(spans):
        return None
    spans = spans[np.argsort(spans[:, 0])]
    first, last = int(spans[0, 0]), int(spans[:, 1].max())
    begin = prompts_until if first <= prompts_until < last else first
    begin = last - int(_LAST * (last - begin))
    if begin >= last:
        return None
    starts, ends = spans.clip(begin, last).T
    # Whatever had begun before has ended by then: the rest of a span is new.
    over = np.maximum.accumulate(np.concatenate([[begin], ends[:-1]]))
    busy = np.maximum(ends - np.maximum(starts, over), 0).sum()
    return Busy(float(busy / (last - begin)), (last - begin) / 1e9)
