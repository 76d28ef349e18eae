"""The timekeeper by itself: nothing of what it is told gets lost, however much it is, and its phases add up."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_timekeeper import Clock, assert_in_order, rows_of

from hf_batchllm.engine.timekeeper import Timekeeper
from hf_batchllm.planning.paged_cache import PagedCache
from hf_batchllm.results.timeline import PHASES, Timeline

# -- stretches -------------------------------------------------------------------------------------------------

GAPS = st.sampled_from([0.0, 1e-6, 0.001, 0.01, 1.0, 100.0])
COUNTS = st.integers(0, 300)


class Held:
    """A cache, as far as a timekeeper looks at it."""

    num_pages, free_pages, requests = 1000, 0, 0


@given(
    st.lists(st.tuples(GAPS, st.integers(1, 100), COUNTS, COUNTS), max_size=8),
    st.sampled_from([8, 64]),
    st.randoms(use_true_random=False),
)
def test_steps_are_joined_and_nothing_of_them_is_lost(
    groups: list[tuple[float, int, int, int]], most_stretches: int, dice: random.Random
) -> None:
    clock, held = Clock(), Held()
    timekeeper = Timekeeper(clock)
    timekeeper.start(held)  # type: ignore[arg-type]
    seen = []
    with mock.patch("hf_batchllm.engine.timekeeper._MOST_STRETCHES", most_stretches):
        for gap, count, prompt, decode in groups:
            for _ in range(count):
                held.requests, held.free_pages = dice.randrange(100), dice.randrange(1000)
                stretch = timekeeper.launched(dice.choice([1, 1, 16]), prompt, decode)
                clock.now += gap
                timekeeper.collected(stretch)
                row = (stretch.steps, prompt, decode, held.requests, held.num_pages - held.free_pages)
                seen.append((clock.now - 100, row))
    timeline = timekeeper.timeline(timekeeper.seconds, page_bytes=7)
    assert_in_order(timeline, clock.now - 100)
    assert len(timeline) <= most_stretches
    # Each stretch is made of the next few steps, and of all that happened to them.
    left, begin = iter(seen), 0.0
    for end, row in zip(timeline.ends.tolist(), rows_of(timeline, 7), strict=True):
        mine = []
        while sum(each[0] for _, each in mine) < row[0]:
            mine.append(next(left))
        sums = [sum(each[column] for _, each in mine) for column in range(3)]
        most = [max(each[column] for _, each in mine) for column in (3, 4)]
        assert row == (*sums, *most)
        assert end == mine[-1][0]
        # However long the run becomes, what is joined is a small part of it.
        assert len(mine) == 1 or end - begin <= 4 * (clock.now - 100) / most_stretches
        begin = end
    assert next(left, None) is None


def test_few_steps_each_have_a_stretch_and_many_have_few() -> None:
    for count, least in ((1, 1), (512, 512), (513, 100), (50_000, 100)):
        clock = Clock()
        timekeeper = Timekeeper(clock)
        timekeeper.start(PagedCache(1, 1))
        for _ in range(count):
            clock.now += 0.01
            timekeeper.collected(timekeeper.launched(1, 0, 2))
        timeline = timekeeper.timeline(timekeeper.seconds, 1)
        assert least <= len(timeline) <= 512
        assert timeline.steps.sum() == count and timeline.decode_tokens.sum() == 2 * count


# -- phases ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(list(PHASES)), st.floats(0, 1000)), max_size=30))
def test_phases_add_up_to_the_seconds(switches: list[tuple[str, float]]) -> None:
    clock = Clock()
    timekeeper = Timekeeper(clock)
    expected, phase = dict.fromkeys(PHASES, 0.0), "prompts"
    for following, seconds in switches:
        clock.now += seconds
        expected[phase] += seconds
        timekeeper.switch(following)
        phase = following
    clock.now += 3
    expected[phase] += 3
    phases = timekeeper.timeline(timekeeper.seconds, 1).phases
    assert sum(phases.values()) == pytest.approx(clock.now - 100)
    assert phases == pytest.approx(expected)


def test_a_phase_within_another_ends_with_its_block() -> None:
    clock = Clock()
    timekeeper = Timekeeper(clock)

    def fails() -> None:
        clock.now += 1
        with timekeeper.during("outside"):
            clock.now += 2
        clock.now += 4
        raise KeyError

    timekeeper.switch("model")
    with pytest.raises(KeyError):
        timekeeper.around("tokens", fails)()
    clock.now += 8
    phases = timekeeper.timeline(timekeeper.seconds, 1).phases
    assert {phase: seconds for phase, seconds in phases.items() if seconds} == {"model": 8, "tokens": 5, "outside": 2}


def test_captures_are_told_from_launching() -> None:
    clock = Clock()
    timekeeper = Timekeeper(clock, ahead=True)
    timekeeper.switch(timekeeper.launching)
    clock.now += 5
    for _ in range(2):  # in that phase, and after it
        phases = timekeeper.timeline(timekeeper.seconds, 1, capture=3).phases
        assert (phases["launching"], phases["capture"], phases["model"]) == (2, 3, 0)
        timekeeper.switch("model")


def test_the_line_in_the_report() -> None:
    phases = dict.fromkeys(PHASES, 0.0)
    empty = Timeline(0.0, *[np.zeros(0, dtype=np.int64)] * 6, phases)
    assert empty.longest_phases == "" and len(empty) == 0
    phases |= {"model": 83.2, "tokens": 9.0, "planning": 4.1, "scheduling": 3.0, "prompts": 0.4, "results": 0.3}
    assert empty.longest_phases == "model 83%, tokens 9%, planning 4%, scheduling 3%"
    phases |= {"capture": 30.0, "launching": 20.0}
    assert empty.longest_phases.count(",") == 4
