"""``hf-batchllm plan``: figures and a page, with or without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support_command import refused
from support_command import saved as saved  # a fixture
from support_command import written as written  # a fixture

from hf_batchllm.cli import main


def test_plan(written: Callable[..., str], saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    shared = " ".join(f"w{index}" for index in range(60))
    written(*({"prompt": f"{shared} w{index}"} for index in range(70, 74)), "no json")
    assert main(["plan", "in.jsonl", "--tokenizer", saved, "--html", "plan.html"]) == 3
    out, err = capsys.readouterr()
    assert "tokens to compute" in out
    assert "line 5, column 1: is not JSON" in err
    assert "60 tokens" in Path("plan.html").read_text()
    assert main(["plan", "in.jsonl", "--tokenizer", saved, "--json", "--limit", "4"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == {
        "prompts": 4,
        "tokens": 244,
        "computed_tokens": 64,
        "saved_tokens": 180,
        "saving": 180 / 244,
        "errors": 0,
    }
    written(name="empty.jsonl")
    assert main(["plan", "empty.jsonl", "--json"]) == 0 and '"saving": 0.0' in capsys.readouterr().out
    assert main(["plan", "empty.jsonl", "--html", "empty.html"]) == 0 and capsys.readouterr().out
    assert "pass --tokenizer" in refused(capsys, "plan", "in.jsonl")
