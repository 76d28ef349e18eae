"""The bar: what it says, that it moves before anything has finished, and when it keeps quiet."""

from __future__ import annotations

import io
import random
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support_families import build, random_prompts
from support_parity import pages_of_memory
from support_timekeeper import Clock
from support_word_tokenizer import word_tokenizer
from transformers.utils import logging

from hf_batchllm import BatchGenerator, BatchResult, GenerationInterrupted, plan_prompts
from hf_batchllm.engine import cost
from hf_batchllm.engine.cost import StepCosts, cost_of_head
from hf_batchllm.engine.progress import CallBar, Progress, expected_tokens, longest_of, whole_run
from hf_batchllm.inputs import preparing
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.planning.requests_and_prefixes import FinishReason, Request
from hf_batchllm.planning.step import Chunk, Step

LINE = re.compile(
    r" *(?P<percent>\d+)%\|.*\| (?:\[[\d:]+<[\d:]+\] (?P<phase>reading prompts|writing|reading) "
    r"(?P<now>[\d,]+) / (?P<of>[\d,]+) · [\d,]+ (?:tok|scores)/s · "
    r"(?P<done>[\d,]+) / (?P<all>[\d,]+) done(?P<more>.*)|(?P<before>.*))"
)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the bar draws, every time that it may."""
    screen = io.StringIO()
    tqdm, how = preparing.tqdm, {"file": screen, "mininterval": 0, "ncols": 120}
    monkeypatch.setattr(preparing, "tqdm", lambda **options: tqdm(**options | how))
    monkeypatch.setattr(preparing, "_on_terminal", lambda: True)
    return screen


def lines(screen: io.StringIO) -> list[Any]:
    found = [LINE.match(line) for line in screen.getvalue().replace("\n", "\r").split("\r") if line.strip()]
    assert all(found), screen.getvalue()
    return found


def filled(screen: io.StringIO, result: BatchResult) -> list[Any]:
    """The lines of a bar that never went back and ended full, with all that is in the result."""
    shown = lines(screen)
    percent = [int(line["percent"]) for line in shown]
    assert percent == sorted(percent) and percent[-1] == 100
    last = shown[-1]
    assert last["done"] == last["all"] == str(len(result))
    assert last["more"] == (f" · {result.report.saving:.0%} saved" if result.report.saving >= 0.005 else "")
    return shown


def prompts(count: int, seed: int = 4) -> list[list[int]]:
    return random_prompts(random.Random(seed), 97, "mixed", count)


def test_it_moves_with_every_step_and_ends_full(drawn: io.StringIO) -> None:
    given = prompts(14)
    generator = BatchGenerator(build("llama"), max_batch_tokens=24, min_shared_tokens=4)
    result = generator.generate(given, max_new_tokens=5, progress=True)
    shown = filled(drawn, result)
    assert shown[0]["percent"] == "0" and shown[0]["before"] == "14 prompts"
    before_any_finished = {line["now"] for line in shown if line["done"] == "0"}
    assert len(before_any_finished) > 5
    phases = [line["phase"] for line in shown if line["phase"]]
    assert phases[0] == "reading prompts" and phases[-1] == "writing"
    assert int(shown[-1]["now"]) == int(shown[-1]["of"]) == result.report.new_tokens
    (read,) = {line["of"] for line in shown if line["phase"] == "reading prompts"}
    assert int(read.replace(",", "")) == result.report.computed_tokens


def test_it_ends_full_when_answers_stop_early_and_when_memory_is_short(drawn: io.StringIO) -> None:
    model = build("llama")
    generator = BatchGenerator(model, page_size=8, kv_memory=pages_of_memory(model, 10, 8))
    options = {"do_sample": True, "num_return_sequences": 3, "eos_token_id": [5, 6, 7]}
    result = generator.generate(prompts(20), max_new_tokens=30, seed=1, progress=True, **options)
    assert result.report.preemptions
    assert {generation.finish_reason for generation in result} == {"stop", "length"}
    shown = filled(drawn, result)
    assert shown[0]["before"] == f"{len(result)} samples"
    assert int(shown[-1]["now"]) == int(shown[-1]["of"]) == result.report.new_tokens


def test_a_beam_search_that_looks_further_than_its_answers_does_not_fill_it_twice(drawn: io.StringIO) -> None:
    options = {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": list(range(1, 90, 2)), "pad_token_id": 0}
    options |= {"early_stopping": "never", "length_penalty": 0.3, "max_new_tokens": 30}
    generator = BatchGenerator(build("llama"), max_batch_tokens=40, min_shared_tokens=4)
    result = generator.generate(prompts(12), progress=True, **options)
    shown = filled(drawn, result)
    assert len({line["done"] for line in shown}) > 3  # some have finished before others


def test_nothing_is_said_of_sharing_where_there_is_none(drawn: io.StringIO) -> None:
    filled(drawn, BatchGenerator(build("llama")).generate([[5, 6], [7, 8]], max_new_tokens=2, progress=True))
    assert "saved" not in drawn.getvalue() and "tok/s" in drawn.getvalue()


def test_an_interrupt_leaves_it_where_it_was(drawn: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = ModelRunner.step, 0

    def interrupted(self: ModelRunner, batch: Any, *latest: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return step(self, batch, *latest)

    monkeypatch.setattr(ModelRunner, "step", interrupted)
    with pytest.raises(GenerationInterrupted):
        BatchGenerator(build("llama"), max_batch_tokens=24).generate(prompts(14), max_new_tokens=5, progress=True)
    assert 0 < int(lines(drawn)[-1]["percent"]) < 100


@pytest.mark.parametrize(
    ("count", "wanted", "switched_on", "shown"),
    [
        (31, None, True, False),
        (32, None, True, True),
        (32, None, False, False),
        (32, False, True, False),
        (2, True, False, True),
    ],
)
def test_when_it_is_shown(drawn: io.StringIO, count: int, wanted: bool | None, switched_on: bool, shown: bool) -> None:
    given = [[5 + index % 80, 7] for index in range(count)]
    was_on = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if switched_on else logging.disable_progress_bar)()
    try:
        BatchGenerator(build("llama")).generate(given, max_new_tokens=2, progress=wanted)
    finally:
        (logging.enable_progress_bar if was_on else logging.disable_progress_bar)()
    assert bool(drawn.getvalue()) == shown


def test_a_widget_ends_full_where_answers_ended_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ipywidgets are installed, what a notebook shows has a length of its own."""
    tqdm, bars = preparing.tqdm, []

    def kept(**options: Any) -> Any:
        bar = tqdm(**options | {"file": io.StringIO()})
        if not bar.disable:
            bars.append(bar)
        return bar

    monkeypatch.setattr(preparing, "tqdm", kept)
    monkeypatch.setattr(preparing, "_on_terminal", lambda: True)
    options = {"do_sample": True, "eos_token_id": [5, 6, 7], "seed": 1}
    BatchGenerator(build("llama")).generate(prompts(20), max_new_tokens=30, progress=True, **options)
    (bar,) = bars
    assert bar.n == bar.total == 1


# -- what it expects -------------------------------------------------------------------------------------------


def played(
    prompts: int, tokens: int, new_tokens: int, costs: tuple[float, float, float], budget: int = 512, room: int = 10**6
) -> dict[float, float]:
    """What is expected while a machine of the given costs runs a list: share of the time -> the whole time, expected.

    costs: seconds of a step, of a token of a prompt and of one of an answer. room: requests that run at a time.
    """
    clock, (a_step, of_prompt, of_answer) = Clock(), costs
    waiting = [Request(index, np.zeros(tokens, np.int32), new_tokens, can_stop=False) for index in range(prompts)]
    left = dict.fromkeys(waiting, tokens)
    bar = SimpleNamespace(disable=False, mininterval=0.0, n=0.0, total=1.0)
    bar.set_description_str = bar.refresh = lambda *_, **__: None
    shown = Progress(
        CallBar(bar, prompts, 0.0), waiting, prompts * tokens, StepCosts(), rows=min(prompts, room), clock=clock
    )
    begin, running = clock.now, list[Request]()
    expected: list[tuple[float, float]] = []
    while waiting or running:
        step = Step(rows=list(running))
        free, whole = budget, []
        for request in waiting[: room - len(running)]:
            take = min(free, left[request])
            if take:
                step.chunks.append(Chunk(request, tokens - left[request], tokens - left[request] + take))
            left[request], free = left[request] - take, free - take
            if take and not left[request]:
                whole.append(request)
        step._sampling = step.rows + whole
        clock.now += a_step + of_prompt * (budget - free) + of_answer * len(step.rows)
        for request in step.sampling():
            request.generated.append(0)
            if len(request.generated) == new_tokens:
                request.end(FinishReason.LENGTH)
        shown.step(step, len(step.sampling()))
        expected.append((clock.now - begin, clock.now - begin + shown.seconds_left()))
        for request in step.sampling():
            if request.done:
                shown.finish(request)
        waiting = [request for request in waiting if left[request]]
        running = [request for request in step.sampling() if not request.done]
    whole_time = clock.now - begin
    at = {share: min(expected, key=lambda each: abs(each[0] - share * whole_time))[1] for share in (0.25, 0.5, 0.75)}
    return {share: value / whole_time for share, value in at.items()}


@pytest.mark.parametrize("costs", [(0.02, 0.001, 0.003), (0.05, 0.0005, 0.0005), (0.1, 0.002, 0.004)])
@pytest.mark.parametrize(
    "given",
    [(24, 1600, 8), (8, 20, 300), (24, 300, 60), (200, 100, 40, 512, 16)],
    ids=["read", "write", "both", "waves"],
)
def test_at_half_time_it_knows_how_long_it_takes(given: tuple[int, ...], costs: tuple[float, float, float]) -> None:
    prompts, tokens, new_tokens, *limits = given
    expected = played(prompts, tokens, new_tokens, costs, *limits)
    assert expected[0.5] == pytest.approx(1, abs=0.25), expected
    assert expected[0.75] == pytest.approx(1, abs=0.15), expected


def test_a_first_step_that_compiles_is_no_measure_and_what_is_not_done_for_long_keeps_its_rate() -> None:
    costs = StepCosts(on_gpu=True)
    assert costs(1, 512, 8) == 0, "nothing is known"
    costs.learn(1, 512, 0, 60.0)
    assert costs(1, 512, 0) == pytest.approx(60)
    for _ in range(4):
        costs.learn(1, 512, 0, 0.5)
    reading = costs(0, 512, 0)
    assert costs(1, 512, 0) == pytest.approx(0.5, rel=0.01) and 0 < reading < 0.5
    for _ in range(2000):
        costs.learn(1, 0, 64, 0.01)
    assert costs(1, 0, 64) == pytest.approx(0.01) and costs(0, 512, 0) == reading
    assert costs.learn(1, 512, 0, 0.4) > 0.9, "prompts take the most of the next step that reads some"


def test_steps_that_take_less_the_fewer_their_tokens_do_not_make_answers_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_MEMORY", 0.01)
    costs = StepCosts(on_gpu=True)
    for tokens, seconds in [(1000, 1.0), (10, 1e-9)] * 200:
        costs.learn(1, tokens, 0, seconds)
    assert costs(1, 0, 64) > 1e-5 and costs.learn(1, 0, 64, 0.01) == 0


def test_the_head_counts_where_it_is_large() -> None:
    model = build("llama")
    head = cost_of_head(model, model.config.vocab_size)
    assert 1 < head < 2 and cost_of_head(model, 3) == 1
    assert StepCosts(head=2.0)._answer_token == 2 * StepCosts()._answer_token


def test_answers_that_stop_early_are_expected_to_go_on_doing_so() -> None:
    assert expected_tokens(100, 0.0) == 100 and expected_tokens(100, 0.5) == pytest.approx(2)
    assert longest_of(50, 100, 0.0) == 100 and longest_of(50, 1000, 0.1) == pytest.approx(45, abs=3)


def test_a_run_of_several_calls_counts_from_what_was_done_before(drawn: io.StringIO) -> None:
    generator = BatchGenerator(build("llama"), max_batch_tokens=24, min_shared_tokens=4)
    with whole_run(records=40, before=20, shown=True) as run:
        for seed in (1, 2):
            run.call_begins(10)
            for _ in generator.stream(prompts(10, seed), max_new_tokens=3):
                run.done += 1
    shown = lines(drawn)
    percent = [int(line["percent"]) for line in shown]
    assert percent == sorted(percent) and percent[0] == 50 and percent[-1] == 100
    assert shown[0]["before"] == "20 of 40 done before"
    of_calls = [line for line in shown if line["phase"]]
    assert {line["all"] for line in of_calls} == {"40"} and of_calls[0]["done"] == "20"
    assert all(line["more"].startswith(" (20 before)") for line in of_calls)
    first_call = [int(line["percent"]) for line in of_calls if int(line["done"]) < 30]
    assert first_call[0] > 50 and max(first_call) <= 75


def test_making_tokens_and_planning_have_bars_where_they_take_long(
    drawn: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "_PATIENCE", 0.0)
    for work in ("texts", "plan"):
        monkeypatch.setitem(preparing._LONG_WORK, work, (3, preparing._LONG_WORK[work][1]))
    tokenizer = word_tokenizer()
    generator = BatchGenerator(build("llama"), tokenizer)
    texts = ["w3 w4 w5 w6"] * 4
    generator.generate(texts, max_new_tokens=1, progress=False)
    assert not drawn.getvalue()
    generator.generate(texts, max_new_tokens=1)
    assert "making tokens of prompts 4 / 4" in drawn.getvalue() and "planning what 4 prompts share" in drawn.getvalue()
    for plan in (generator.plan, lambda given: plan_prompts(given, tokenizer)):
        drawn.truncate(drawn.seek(0))
        plan(texts)
        assert "making tokens" in drawn.getvalue() and "planning" in drawn.getvalue()
