"""The bar where nothing can be drawn over: whole lines, few of them."""

from __future__ import annotations

import pytest
from support_families import build
from support_timekeeper import Clock

from hf_batchllm import BatchGenerator
from hf_batchllm.inputs.preparing import LogBar, open_bar


def test_a_line_each_half_minute_and_then_each_twentieth_of_the_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("tqdm.std.time", clock)
    with open_bar(True, total=1.0, bar_format="{percentage:3.0f}%|{bar}| {desc}", desc="begins") as bar:
        assert isinstance(bar, LogBar)
        assert capsys.readouterr().err == "  0% begins\n"
        lines = []
        for second in range(1, 36_001):
            clock.now += 1.0
            bar.n = second / 36_001
            bar.set_description_str(f"after {second} s", refresh=False)
            bar.refresh()
            lines += [second] if capsys.readouterr().err else []
    assert lines[:4] == [30, 60, 90, 120]
    assert 80 < len(lines) < 130 and lines[-1] - lines[-2] > 1000
    assert capsys.readouterr().err == "100% after 36000 s\n"


def test_a_call_in_a_log_ends_with_all_that_it_has_done(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [[5 + number, 7, 9] for number in range(40)]
    BatchGenerator(build("llama"), max_batch_tokens=24).generate(prompts, max_new_tokens=5)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "  0% 40 prompts"
    assert last.startswith("100% [") and last.endswith("40 / 40 done") and "writing 200 / 200" in last


def test_what_goes_away_on_a_terminal_is_not_repeated_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with open_bar(True, total=9, bar_format="planning ...", leave=False):
        pass
    assert capsys.readouterr().err == "planning ...\n"
    with open_bar(False, total=9, bar_format="planning ..."):
        pass
    assert not capsys.readouterr().err
