"""The share of the time in which a GPU had work, while a run was decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from .device_time import spans_of

_LAST_SHARE = 0.6  # of the decode part; at its beginning graphs are captured


@dataclass(frozen=True)
class GpuBusy:
    share: float
    seconds: float  # over which the share was measured


def gpu_busy(device: torch.device, run: Callable[[], object], prompts_until: Callable[[], int]) -> GpuBusy | None:
    """None if the device cannot be profiled. ``prompts_until``: when the prompts ended, in ns."""
    spans = [(span.start, span.end) for span in spans_of(device, run)]
    return busy_share_of(np.array(spans, dtype=np.int64).reshape(-1, 2), prompts_until())


def busy_share_of(spans: np.ndarray, prompts_until: int) -> GpuBusy | None:  # [spans, 2]
    """Over the last part of the time after the prompts; of all the time, if the profiler has another clock."""
    if not len(spans):
        return None
    spans = spans[np.argsort(spans[:, 0])]
    first, last = int(spans[0, 0]), int(spans[:, 1].max())
    begin = prompts_until if first <= prompts_until < last else first
    begin = last - int(_LAST_SHARE * (last - begin))
    if begin >= last:
        return None
    starts, ends = spans.clip(begin, last).T
    # A span counts from where all earlier ones have ended.
    counted_until = np.maximum.accumulate(np.concatenate([[begin], ends[:-1]]))
    busy = np.maximum(ends - np.maximum(starts, counted_until), 0).sum()
    return GpuBusy(float(busy / (last - begin)), (last - begin) / 1e9)
