"""What tests of guessed tokens share: drafts that always pay, and a clock that stands still."""

from __future__ import annotations

import pytest

from hf_batchllm.engine.device_loop.steps_as_graphs import StepsAsGraphs
from hf_batchllm.engine.drafts import drafts_ahead
from hf_batchllm.engine.drafts.step_seconds import StepSeconds


def always_pay(patch: pytest.MonkeyPatch) -> None:
    """In the loop of a GPU steps of any size take as long: drafts begin after the first burst, and all guesses pay."""
    patch.setattr(StepSeconds, "of", lambda *_: 1.0)
    for name, value in (("_MARGIN", 0.0), ("_BURSTS", 1), ("_TRIED", 10**9), ("_BURSTS_FOR_GRAPHS", 0)):
        patch.setattr(drafts_ahead, name, value)
    patch.setattr(StepsAsGraphs, "is_steady", True)


class Clock:
    """Stands still but for what a test adds to ``now``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr("time.perf_counter", lambda: self.now)
