"""The examples of the folder that have no test of their own, as one would run them, and what they claim.

One model is loaded for all of them. test_examples_json_schemas.py runs json_schemas.py, test_examples_notebook.py
tour.ipynb.
"""

from __future__ import annotations

import copy
import re
import sys
from typing import Any

import pytest
from test_generator_real_model import _examples_module, load_once, small_model

pytestmark = [
    pytest.mark.skipif(not small_model.is_available(), reason=small_model.why_not_available()),
    pytest.mark.xdist_group("real_model"),
    pytest.mark.timeout(900),  # the first run unpacks the model
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the example of a name, with names of its module set anew: its output."""
    loaded = load_once()

    def run(name: str, own_model: bool = False, **smaller: Any) -> str:
        monkeypatch.setattr(small_model, "load", lambda: copy.deepcopy(loaded) if own_model else loaded)
        monkeypatch.setitem(sys.modules, "small_model", small_model)
        example = _examples_module(name)
        for what, value in smaller.items():
            assert hasattr(example, what)
            setattr(example, what, value)
        example.main()
        return capsys.readouterr().out

    return run


def test_quickstart(run: Any) -> None:
    """With one page, and two answers of model.generate."""
    printed = run("quickstart", MODULES=("copy",), TOPICS=(), SHOWN=(0, 5), EVERY=3, MAX_NEW_TOKENS=8)
    assert "same tokens   yes, for 2 of 2 prompts" in printed
    assert _percent(r"tokens saved .*\((\d+)%\)", printed) > 70
    assert printed.count("result[") == 2


def test_rag(run: Any) -> None:
    printed = run("rag")
    assert _percent(r"question_first .*\((\d+)% saved\)", printed) + 25 < _percent(
        r"page_first .*\((\d+)% saved\)", printed
    )
    found, asked = re.findall(r"(\d+) of (\d+) answers are what the page says", printed)[0]
    assert int(asked) == 12 and int(found) >= 9
    with_kept, without, asked_for = map(int, re.findall(r"(\d+) (?:prompt tokens computed|without)", printed)[-3:])
    assert with_kept < without / 4 < asked_for / 4  # the pages were there still


def test_classify(run: Any) -> None:
    rows = re.findall(r"^  (?:no examples|8, .*?) {2,}(\d+) +(\d+) +(\d+) ", run("classify"), re.MULTILINE)
    assert len(rows) == 3
    for total, _, calibrated in (map(int, row) for row in rows):
        assert calibrated >= 10  # of 16, 4 by chance
        assert calibrated >= total - 1
    assert int(rows[1][2]) >= int(rows[1][0]) + 4  # what a bad order of the examples does, and what repairs it


def test_judge(run: Any) -> None:
    printed = run("judge", SAMPLES=3)
    votes = re.findall(r"^  (\d) : (\d)  (0\.\d\d|1\.00)", printed, re.MULTILINE)
    assert len(votes) == 6 and all(1 <= int(good) + int(bad) <= 3 for good, bad, _ in votes)
    table = {
        way: [int(count) for count in counts]
        for way, *counts in re.findall(r"^  (at once|majority|mean) +(\d) +(\d) +(\d)$", printed, re.MULTILINE)
    }
    assert sum(table["mean"][:2]) >= 8  # of 12, 6 by chance
    assert sum(table["mean"][:2]) > sum(table["at once"][:2])
    assert "for the first case alone: the same samples" in printed


def test_rollouts(run: Any) -> None:
    printed = run("rollouts", own_model=True, UPDATES=1)  # the third one brings the reward to 1
    rows = re.findall(r"^  (\d) +([\d.]+) +(\d+) +(\S+) +(\d+) +(\w+) +([\d.]+) ", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1"]
    rewards = [float(row[1]) for row in rows]
    assert rewards[0] < 0.25 and rewards[1] > rewards[0] + 0.1
    for update, _, cached, ratio, cached_again, tokens, stale in rows:
        assert cached == "0" and int(cached_again) > 30
        assert float(ratio) < 1e-3 and tokens == "same"
        assert (float(stale) > 0.1) == (update != "0")


def _percent(pattern: str, printed: str) -> int:
    (found,) = re.findall(pattern, printed)
    return int(found)
