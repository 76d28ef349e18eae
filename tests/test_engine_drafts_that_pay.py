"""When tokens are guessed in the loop of a GPU, by a clock that stands still."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support_calls import noted
from support_drafts import GIVEN, Clock, requests_of
from support_drafts import seconds_of as seconds_of_drafts

from hf_batchllm.engine.cost import StepSeconds
from hf_batchllm.engine.device_loop.graph_sizes import size_of
from hf_batchllm.engine.drafts.drafts_ahead import DraftsAhead
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.step import Step

Guesses = Callable[[Request, random.Random], bool]  # whether an answer has a guess
EACH = 1 / 320


def ahead(requests: list[Request]) -> DraftsAhead:
    return DraftsAhead(*GIVEN, requests, lambda _, end: end, 10**6)


def seconds_of(
    right: float, rows: int, patch: pytest.MonkeyPatch, host: float = 0.1, guesses: float | Guesses = 1.0
) -> float:
    """How many times as long it takes with guesses: each of which is right with this chance, where there are any."""

    def make(requests: list[Request], _: Clock, dice: random.Random) -> DraftsAhead:
        drafts = ahead(requests)
        chance = guesses if callable(guesses) else lambda _, dice: dice.random() < guesses
        drafts._guess = lambda request: [1] * 8 if chance(request, dice) else []  # type: ignore[method-assign]
        return drafts

    return seconds_of_drafts(make, right, rows, EACH, patch, times=16, host=host, size_of=size_of)


@pytest.mark.parametrize("rows", [1, 8, 40, 100])
@pytest.mark.parametrize("host", [0.1, 0.5])
def test_drafts_cost_little_where_guesses_are_wrong(rows: int, host: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for right, guesses, most in (
        (0.0, 1.0, 1.02), (0.2, 1.0, 1.06), (0.4, 1.0, 1.06), (0.95, 0.1, 1.1), (0.95, 1.0, 0.4 if rows < 20 else 0.8),
    ):  # fmt: skip
        assert seconds_of(right, rows, monkeypatch, host, guesses) < most


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_drafts_that_pay_go_on(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a room ends."""
    ends = noted(monkeypatch, DraftsAhead, "_end", lambda self: 1)
    assert seconds_of(0.95, rows, monkeypatch) < 0.8
    assert not ends
    assert seconds_of(0.7, rows, monkeypatch, guesses=0.6) < (0.7 if rows == 1 else 0.9)
    assert len(ends) < 8


def test_where_no_tokens_are_guessed_for_long_drafts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """And begin again soon: that an answer copies now and then says nothing of what it costs."""

    def guesses(request: Request, _: random.Random) -> bool:
        return len(request.generated) // 40 % 2 == 0

    pauses = noted(monkeypatch, DraftsAhead, "_end", lambda self: self._pause, after=True)
    assert seconds_of(0.95, 1, monkeypatch, guesses=guesses) < 0.9
    assert len(pauses) > 3 and len(set(pauses)) == 1


def test_a_full_batch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_of(0.9, 300, monkeypatch) == pytest.approx(1.0, abs=0.01)  # the last burst is cut off


def test_a_pause_of_the_callers_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream hands a result out between two steps."""
    drafted: list[int] = []

    def make(requests: list[Request], clock: Clock, _: random.Random) -> DraftsAhead:
        drafts = ahead(requests)
        drafts._guess, own = lambda _: [1] * 8, drafts.added  # type: ignore[method-assign]

        def added(step: Step) -> Step:
            found = own(step)
            if found is not step:
                drafted.append(1)
                clock.now += 50 if len(drafted) == 10 else 0
            return found

        drafts.added = added  # type: ignore[method-assign]
        return drafts

    timing = {"times": 16, "host": 0.1, "size_of": size_of, "paused": 50}
    assert seconds_of_drafts(make, 0.95, 8, EACH, monkeypatch, **timing) < 0.5
    assert len(drafted) > 50


def test_which_graphs_are_worth_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for few rows only if many steps are left with so few."""
    requests = requests_of(40, 100)
    drafts = ahead(requests)
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
