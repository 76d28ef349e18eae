"""The evaluation harness is timed beside its own ``hf`` model, and both give the same numbers."""

from __future__ import annotations

import importlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from support_lm_eval import saved as saved  # a fixture

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "benchmarks"
pytestmark = pytest.mark.xdist_group("lm_eval")  # the harness takes seconds to import


def test_the_bench_runs(saved: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(logging, "disable", lambda level: None)  # the script's is for its whole process
    bench = importlib.import_module("bench_harness").main
    small = "--questions 3 --shots 1 --choices 2 --runs 1 --batch-sizes 1 2 --device cpu --dtype float32"
    for more in ([], ["--letters", "--sampler", "default", "--rival-questions", "2"]):
        bench(["--model", str(saved), *small.split(), *more])
        shown = capsys.readouterr().out
        assert "hf, batches of " in shown and ", is_greedy in 0 of" in shown
        assert float(re.search(r"differ by (\S+) at most", shown)[1]) < 1e-4
