"""When tokens are guessed in the loop of a GPU, by a clock that stands still."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from support_device_loop import device as device  # a fixture
from support_drafts import Clock, take_guesses

from hf_batchllm.engine.cost import StepSeconds
from hf_batchllm.engine.device_loop.graph_sizes import size_of
from hf_batchllm.engine.drafts.drafts_ahead import DraftsAhead
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.step import Step

Guesses = Callable[[Request, random.Random], bool]  # whether an answer has a guess


def seconds_of(
    right: float, rows: int, host: float, each: float, monkeypatch: pytest.MonkeyPatch, guesses: float | Guesses = 1.0
) -> float:
    """How many times as long it takes, where guesses are right with this chance, a step takes 1 second and each of its
    tokens so many beside, and the host so many between two steps that it waits for."""
    with monkeypatch.context() as patch:
        chance = guesses if callable(guesses) else lambda _, dice: dice.random() < guesses
        return _seconds_of(right, rows, host, each, Clock(patch), chance)


def _seconds_of(
    right: float, rows: int, host: float, each: float, clock: Clock, guesses: Guesses, paused: float = 0.0
) -> float:
    dice, times, total = random.Random(3), 16, 600
    requests = [Request(place, np.array([1, 2, 3], dtype=np.int32), 10**6) for place in range(rows)]
    drafts = DraftsAhead(lambda _: 8, lambda _: 3, requests, lambda _, end: end, None, 10**6)
    drafts._guess = lambda request: [1] * 8 if guesses(request, dice) else []  # type: ignore[method-assign]
    for request in requests:
        request.generated, request.computed = [1], 4

    def token() -> int:
        return 1 if dice.random() < right else 2

    while sum(len(request.generated) for request in requests) < total * rows:
        step, began = Step(requests), clock.now
        waited = drafts.must_know
        step.times = drafts.most_times(step, times)
        step = drafts.added(step)
        clock.now += host if waited else 0.0
        launched = clock.now
        drafts.launched(step)
        size = size_of(step.tokens) if step.room is None else step.room.size
        clock.now += step.times * (1 + each * size)
        gained = 0
        if step.in_rows:
            for request in requests:
                request.generated.append(token())
            gained = rows + take_guesses(drafts, step.drafts, token)
        else:
            drafts.before(step)
            for request in requests:
                request.generated += [token() for _ in range(step.times)]
        drafts.ran(step, began, launched, gained or rows, True)
    without = sum(len(request.generated) for request in requests) / rows * (1 + each * size_of(rows))
    assert drafts.saved_seconds == pytest.approx(without - (clock.now - paused), abs=0.03 * without)
    return clock.now / without


@pytest.mark.parametrize("rows", [1, 8, 40, 100])
@pytest.mark.parametrize("host", [0.1, 0.5])
def test_drafts_cost_little_where_guesses_are_wrong(rows: int, host: float, monkeypatch: pytest.MonkeyPatch) -> None:
    each = 1 / 320
    assert seconds_of(0.0, rows, host, each, monkeypatch) < 1.02
    assert seconds_of(0.2, rows, host, each, monkeypatch) < 1.06
    assert seconds_of(0.4, rows, host, each, monkeypatch) < 1.06
    assert seconds_of(0.95, rows, host, each, monkeypatch, guesses=0.1) < 1.1
    assert seconds_of(0.95, rows, host, each, monkeypatch) < (0.4 if rows < 20 else 0.8)


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_drafts_that_pay_go_on(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a room ends."""
    ends, own = [0], DraftsAhead._end

    def end(self: DraftsAhead) -> None:
        ends[0] += 1
        own(self)

    monkeypatch.setattr(DraftsAhead, "_end", end)
    assert seconds_of(0.95, rows, 0.1, 1 / 320, monkeypatch) < 0.8
    assert ends[0] == 0
    assert seconds_of(0.7, rows, 0.1, 1 / 320, monkeypatch, guesses=0.6) < (0.7 if rows == 1 else 0.9)
    assert ends[0] < 8


def test_where_no_tokens_are_guessed_for_long_drafts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """And begin again soon: that an answer copies now and then says nothing of what it costs."""

    def guesses(request: Request, _: random.Random) -> bool:
        return len(request.generated) // 40 % 2 == 0

    pauses, own = list[int](), DraftsAhead._end

    def end(self: DraftsAhead) -> None:
        own(self)
        pauses.append(self._pause)

    monkeypatch.setattr(DraftsAhead, "_end", end)
    assert seconds_of(0.95, 1, 0.1, 1 / 320, monkeypatch, guesses) < 0.9
    assert len(pauses) > 3 and len(set(pauses)) == 1


def test_a_full_batch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_of(0.9, 300, 0.1, 1 / 320, monkeypatch) == pytest.approx(1.0, abs=0.01)  # the last burst is cut off


def test_a_pause_of_the_callers_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream hands a result out between two steps."""
    with monkeypatch.context() as patch:
        clock, own, drafted = Clock(patch), DraftsAhead.most_times, []

        def most_times(self: DraftsAhead, step: Step, most: int) -> int:
            times = own(self, step, most)
            if self._planned is not None:
                drafted.append(step)
                clock.now += 50 if len(drafted) == 10 else 0
            return times

        patch.setattr(DraftsAhead, "most_times", most_times)
        assert _seconds_of(0.95, 8, 0.1, 1 / 320, clock, lambda *_: True, paused=50) < 0.5
    assert len(drafted) > 50


def test_which_graphs_are_worth_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for few rows only if many steps are left with so few."""
    requests = [Request(place, np.array([1, 2, 3], dtype=np.int32), 100) for place in range(40)]
    drafts = DraftsAhead(lambda _: 8, lambda _: 3, requests, lambda _, end: end, None, 10**6)
    monkeypatch.setattr(drafts, "_of_all", (0.5, 1.0))
    for size, seconds in ((16, 0.005), (64, 0.006), (128, 0.007), (256, 0.010)):
        drafts._device.note(size, seconds)
    assert drafts._sizes_to_come(requests, 40 * 5) == [256]  # all end at the same time
    for place, request in enumerate(requests):
        request.max_new_tokens = 100 + 20 * place
    assert drafts._sizes_to_come(requests, 40 * 5) == [128, 256]
    for place, request in enumerate(requests):
        request.max_new_tokens = 100 + 200 * place
    assert drafts._sizes_to_come(requests, 40 * 5) == [16, 64, 128, 256]
    assert drafts._sizes_to_come(requests[:20], 60) == [16, 64]


def test_how_long_steps_take() -> None:
    seconds = StepSeconds()
    assert seconds.of(8) is None
    seconds.note(64, 1.0)
    assert seconds.of(64) == 1.0
    twice, half = seconds.of(64 + 320), seconds.of(1)
    assert twice == pytest.approx(2.0) and half is not None and 0.7 < half < 1
    seconds.note(256, 2.0)
    assert seconds.of(160) == pytest.approx(1.5) and seconds.of(448) == pytest.approx(3.2)
    for _ in range(20):
        seconds.note(256, 1.5)
    assert seconds.of(256) == pytest.approx(1.5, abs=0.01)
    seconds.note(16, 0.2)  # then the others were far too slow
    largest = seconds.of(256)
    assert largest is not None and largest <= 0.2 * 4.01 and seconds.of(16) == 0.2


def test_one_measurement_that_is_far_off_misleads_nobody() -> None:
    """A graph was captured meanwhile; or the host was late to launch a step, which had been at work by then."""

    def taken(rows: int) -> float:
        return 6.5 + max(0, rows - 128) / 50

    seconds = StepSeconds()
    for rows in (256, 208, 160):
        seconds.note(rows, taken(rows))
    seconds.note(144, 40.0)
    seconds.note(512, 1.9)
    for size in (256, 512):
        for _ in range(5):
            seconds.note(size, taken(size))
    seconds.note(256, 1.9)
    for rows in (4, 32, 128, 144, 160, 256, 512):
        assert seconds.of(rows) == pytest.approx(taken(rows), rel=0.1), rows
    for _ in range(6):
        seconds.note(256, 1.1 * taken(256))  # it has become slower
    assert seconds.of(256) == pytest.approx(1.1 * taken(256))


def test_how_long_steps_take_that_read_much() -> None:
    """What many answers read is no time of their rows: as many rows of few answers are faster."""
    seconds = StepSeconds(share=1e-5)

    def taken(rows: int, read: int) -> float:
        return 5.0 * (1 + rows / 320) + 5.0 * 1e-5 * read

    for rows in (256, 240, 208, 160):
        seconds.note(rows, taken(rows, 500 * rows), 500 * rows)
    for rows, read in ((256, 100 * 500), (160, 100 * 500), (512, 100 * 500)):
        assert seconds.of(rows, read) == pytest.approx(taken(rows, read), rel=0.15)
