"""A clock that tests set, and steps that follow one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hf_batchllm.results.timeline import PHASES, Timeline


class Clock:
    """Stands still unless somebody takes time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return call(*args, **kwargs)

        return called


def rows_of(timeline: Timeline, page_bytes: int = 1) -> list[tuple[int, ...]]:
    """Of each stretch: steps, tokens of prompts and of answers, sequences running, pages in use."""
    columns = (timeline.steps, timeline.prompt_tokens, timeline.decode_tokens, timeline.running)
    assert not (timeline.cache_bytes % page_bytes).any()
    return list(zip(*(column.tolist() for column in (*columns, timeline.cache_bytes // page_bytes)), strict=True))


def assert_in_order(timeline: Timeline, seconds: float) -> None:
    assert 0 <= timeline.begin <= seconds
    assert (np.diff([timeline.begin, *timeline.ends, seconds]) >= 0).all()
    assert list(timeline.phases) == list(PHASES)
    assert min(timeline.phases.values()) >= 0
    assert sum(timeline.phases.values()) == pytest.approx(seconds, rel=1e-9, abs=1e-9)
