"""The example of constrained decoding: each answer of a real model is JSON of its own prompt's schema."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

pytest.importorskip("llguidance", reason="needs the extra `json`")


def _module(name: str) -> Any:
    # By its path: an installed package may be called `examples` too.
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small_model = _module("small_model")

pytestmark = [
    pytest.mark.skipif(not small_model.is_available(), reason=small_model.why_not_available()),
    pytest.mark.xdist_group("real_model"),
    pytest.mark.timeout(900),  # the first run unpacks the model
]


def is_of(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is of a schema, as far as the example's schemas go."""
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    assert schema["type"] == "string"
    return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]


def test_every_answer_follows_the_schema_of_its_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "small_model", small_model)
    example = _module("json_schemas")
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == [text for text, _ in example.TASKS]
    for line, (_, schema) in zip(lines[1::2], example.TASKS, strict=True):
        answer = ast.literal_eval(line.strip())
        assert list(answer) == list(schema)
        assert all(is_of(answer[name], schema[name]) for name in schema)
