"""How much of the time a GPU had something to do while answers grew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

_LAST = 0.6  # of the decode part: graphs are captured at its beginning


@dataclass(frozen=True)
class Busy:
    share: float
    seconds: float  # that were looked at


def busy_share(device: torch.device, run: Callable[[], None], prompts_until: Callable[[], int]) -> Busy | None:
    """None where nobody keeps a record of what the device does. ``prompts_until``: when the prompts ended, in ns."""
    if device.type != "cuda" or torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize(device)
    results = getattr(profile.profiler, "kineto_results", None)
    if results is None:
        return None
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()  # as they were noted: torch's own list of them takes minutes to make
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.name().startswith("ProfilerStep")
    ]
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
