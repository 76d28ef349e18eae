"""The bar: what it says, that it moves before anything has finished, and when it keeps quiet."""

from __future__ import annotations

import io
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from support_families import build, random_prompts
from transformers.utils import logging

from hf_batchllm import BatchGenerator, GenerationInterrupted
from hf_batchllm.engine import progress
from hf_batchllm.model.runner import ModelRunner

LINE = re.compile(r" *(\d+)%\|.*\| ([\d,]+)/([\d,]+) (prompts|samples) \[(.*)\]")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the bar draws, every time that it may."""
    screen = io.StringIO()
    tqdm, how = progress.tqdm, {"file": screen, "mininterval": 0, "ncols": 120}
    monkeypatch.setattr(progress, "tqdm", lambda **options: tqdm(**options | how))
    return screen


def lines(screen: io.StringIO) -> list[Any]:
    found = [LINE.match(line) for line in screen.getvalue().replace("\n", "\r").split("\r") if line.strip()]
    assert all(found), screen.getvalue()
    return found


def prompts(count: int, seed: int = 4) -> list[list[int]]:
    return random_prompts(random.Random(seed), 97, "mixed", count)


def test_it_moves_with_every_step_and_ends_full(drawn: io.StringIO) -> None:
    given = prompts(14)
    generator = BatchGenerator(build("llama"), max_batch_tokens=24, min_shared_tokens=4)
    result = generator.generate(given, max_new_tokens=5, progress=True)
    shown = lines(drawn)
    percent = [int(line[1]) for line in shown]
    assert percent == sorted(percent) and percent[0] == 0 and percent[-1] == 100
    before_any_finished = {int(line[1]) for line in shown if line[2] == "0"}
    assert len(before_any_finished) > 5
    assert shown[-1][2] == shown[-1][3] == str(len(result)) and shown[-1][4] == "prompts"
    assert re.fullmatch(rf"00:\d\d<00:00, [\d,]+ tokens/s, {result.report.saving:.0%} saved", shown[-1][5])


def test_it_ends_full_when_answers_stop_early_and_when_memory_is_short(
    drawn: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = BatchGenerator(build("llama"))
    page = generator.architecture.kv_bytes_per_token * 8
    generator = BatchGenerator(build("llama"), page_size=8, kv_memory=10 * page)
    options = {"do_sample": True, "num_return_sequences": 3, "eos_token_id": [5, 6, 7]}
    result = generator.generate(prompts(20), max_new_tokens=30, seed=1, progress=True, **options)
    assert result.report.preemptions
    assert {generation.finish_reason for generation in result} == {"stop", "length"}
    shown = lines(drawn)
    assert shown[-1][1] == "100" and shown[-1][2] == shown[-1][3] == str(len(result)) and shown[-1][4] == "samples"


def test_a_beam_search_that_looks_further_than_its_answers_does_not_fill_it_twice(drawn: io.StringIO) -> None:
    options = {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": list(range(1, 90, 2)), "pad_token_id": 0}
    options |= {"early_stopping": "never", "length_penalty": 0.3, "max_new_tokens": 30}
    generator = BatchGenerator(build("llama"), max_batch_tokens=40, min_shared_tokens=4)
    result = generator.generate(prompts(12), progress=True, **options)
    shown = lines(drawn)
    percent = [int(line[1]) for line in shown]
    assert percent == sorted(percent) and percent[-1] == 100
    assert len({line[2] for line in shown}) > 3  # some have finished before others
    assert shown[-1][5].endswith(f"{result.report.saving:.0%} saved")


def test_nothing_is_said_of_sharing_where_there_is_none(drawn: io.StringIO) -> None:
    BatchGenerator(build("llama")).generate([[5, 6], [7, 8]], max_new_tokens=2, progress=True)
    assert "saved" not in drawn.getvalue() and "tokens/s" in drawn.getvalue()


def test_an_interrupt_leaves_it_where_it_was(drawn: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = ModelRunner.step, 0

    def interrupted(self: ModelRunner, batch: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(ModelRunner, "step", interrupted)
    with pytest.raises(GenerationInterrupted):
        BatchGenerator(build("llama"), max_batch_tokens=24).generate(prompts(14), max_new_tokens=5, progress=True)
    assert 0 < int(lines(drawn)[-1][1]) < 100


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


def test_a_widget_is_told_that_answers_ended_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ipywidgets are installed, what a notebook shows has a length of its own."""
    tqdm, widget = progress.tqdm, SimpleNamespace(max=None)

    def with_widget(**options: Any) -> Any:
        bar = tqdm(**options | {"file": io.StringIO()})
        bar.container = SimpleNamespace(children=[None, widget, None])
        return bar

    monkeypatch.setattr(progress, "tqdm", with_widget)
    options = {"do_sample": True, "eos_token_id": [5, 6, 7], "seed": 1}
    report = BatchGenerator(build("llama")).generate(prompts(20), max_new_tokens=30, progress=True, **options).report
    assert widget.max == report.computed_tokens + report.new_tokens < report.computed_tokens + 20 * 30
