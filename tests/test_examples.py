"""The examples of the folder that have no test of their own, as one would run them, and what they claim.

Those that claim what a trained model says run over one, the others over a stand-in. test_examples_notebook.py
runs tour.ipynb.
"""

from __future__ import annotations

import ast
import copy
import re
import sys
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from support_real_model import NEEDS_REAL_MODEL, examples_module, load_once, load_stand_in, small_model

from hf_batchllm.errors import OptionValueError
from hf_batchllm.sampling import compiled_grammars

pytestmark = NEEDS_REAL_MODEL


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the example of a name, with names of its module set anew: its output."""

    def run(name: str, stand_in: bool = False, own_model: bool = False, **smaller: Any) -> str:
        loaded = load_stand_in() if stand_in else load_once()
        monkeypatch.setattr(small_model, "load", lambda: copy.deepcopy(loaded) if own_model else loaded)
        monkeypatch.setitem(sys.modules, "small_model", small_model)
        example = examples_module(name)
        for what, value in smaller.items():
            assert hasattr(example, what)
            setattr(example, what, value)
        example.main()
        return capsys.readouterr().out

    return run


def test_quickstart(run: Any) -> None:
    """With one page, and two answers of model.generate."""
    printed = run("quickstart", stand_in=True, MODULES=("copy",), TOPICS=(), SHOWN=(0, 5), EVERY=3, MAX_NEW_TOKENS=8)
    assert "same tokens   yes, for 2 of 2 prompts" in printed
    assert _percent(r"tokens saved .*\((\d+)%\)", printed) > 70
    assert printed.count("result[") == 2


def test_by_hand(run: Any) -> None:
    printed = run("by_hand")
    computed, asked = map(int, re.findall(r"^(\d+) of (\d+) prompt tokens", printed)[0])
    assert computed < asked / 2
    assert all(answer in printed for answer in ("Ana Reis", "4 kilograms", "Rui Costa", "Green and blue"))


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
    some = [("My card was charged twice.", "billing"), ("The box was empty.", "delivery")]
    printed = run("classify", stand_in=True, MESSAGES=some)
    rows = re.findall(r"^  (?:no examples|8, .*?) {2,}(\d+) +(\d+) +(\d+) ", printed, re.MULTILINE)
    assert len(rows) == 3
    assert all(0 <= int(right) <= len(some) for row in rows for right in row)


def test_judge(run: Any) -> None:
    printed = run("judge", stand_in=True, SAMPLES=2)
    votes = re.findall(r"^  (\d) : (\d)  (0\.\d\d|1\.00)", printed, re.MULTILINE)
    assert len(votes) == 6 and all(0 <= int(good) + int(bad) <= 2 for good, bad, _ in votes)
    table = re.findall(r"^  (at once|one sample|majority|mean) +(\d) +(\d) +(\d)$", printed, re.MULTILINE)
    assert len(table) == 4 and table[0][1] == table[0][2] and table[0][3] == "6"  # no seed, no luck
    assert "for the first case alone: the same samples" in printed


def test_rollouts(run: Any) -> None:
    pytest.importorskip("trl", reason="needs TRL: pip install 'hf-batchllm[trl]'")
    printed = run("rollouts", stand_in=True, own_model=True, STEPS=1, SAMPLES=2, NEW_TOKENS=4)
    rows = re.findall(r"^  (\d) +([\d.]+) +(\d+)% +\.\.\. ", printed, re.MULTILINE)
    assert len(rows) == 1 and 0 <= float(rows[0][1]) <= 1 and int(rows[0][2]) > 60


def test_images(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["images.py"])
    monkeypatch.setitem(sys.modules, "small_model", small_model)
    monkeypatch.setitem(sys.modules, "small_image_model", examples_module("small_image_model"))
    printed = run("images", stand_in=True)
    assert "4 images, read by the vision tower in 1 run" in printed
    assert "and the same tokens" in printed
    assert printed.count("How many bars are there?") == 4
    assert _percent(r"\((\d+)\.\d% saved\)", printed) > 50


def test_json_schemas(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is JSON of its own prompt's schema, whatever a model would say."""
    pytest.importorskip("llguidance", reason="needs the extra `json`")
    lines, tasks = run("json_schemas", stand_in=True).splitlines(), examples_module("json_schemas").TASKS
    assert lines[::2] == [text for text, _ in tasks]
    for line, (_, schema) in zip(lines[1::2], tasks, strict=True):
        answer = ast.literal_eval(line.strip())
        assert list(answer) == list(schema)
        assert all(_is_of(answer[name], schema[name]) for name in schema)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    monkeypatch.setattr(compiled_grammars, "_PREPARED", WeakKeyDictionary())
    with pytest.raises(OptionValueError, match=r"`schema` needs llguidance.*: pip install 'hf-batchllm\[json\]'"):
        run("json_schemas", stand_in=True)


def _is_of(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is of a schema, as far as the example's schemas go."""
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    assert schema["type"] == "string"
    return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]


def _percent(pattern: str, printed: str) -> int:
    (found,) = re.findall(pattern, printed)
    return int(found)
