"""The example of constrained decoding: each answer is JSON of its own prompt's schema, whatever a model would say."""

from __future__ import annotations

import ast
import sys
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from support_real_model import NEEDS_REAL_MODEL, examples_module, load_stand_in, small_model

from hf_batchllm.errors import OptionValueError
from hf_batchllm.sampling import compiled_grammars

pytest.importorskip("llguidance", reason="needs the extra `json`")

pytestmark = NEEDS_REAL_MODEL


def is_of(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is of a schema, as far as the example's schemas go."""
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    assert schema["type"] == "string"
    return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]


def test_without_llguidance_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_stand_in()
    monkeypatch.setattr(small_model, "load", lambda: loaded)
    monkeypatch.setitem(sys.modules, "small_model", small_model)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    monkeypatch.setattr(compiled_grammars, "_PREPARED", WeakKeyDictionary())
    with pytest.raises(OptionValueError, match=r"`schema` needs llguidance.*: pip install 'hf-batchllm\[json\]'"):
        examples_module("json_schemas").main()


def test_every_answer_follows_the_schema_of_its_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_stand_in()
    monkeypatch.setattr(small_model, "load", lambda: loaded)
    monkeypatch.setitem(sys.modules, "small_model", small_model)
    example = examples_module("json_schemas")
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == [text for text, _ in example.TASKS]
    for line, (_, schema) in zip(lines[1::2], example.TASKS, strict=True):
        answer = ast.literal_eval(line.strip())
        assert list(answer) == list(schema)
        assert all(is_of(answer[name], schema[name]) for name in schema)
