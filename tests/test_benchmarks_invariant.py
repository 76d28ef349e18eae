"""The scripts about invariant=True, on a CPU: one finds a broken promise, the other prints what the promise costs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support_bench import settings_of_others as settings_of_others  # a fixture
from support_invariant import that_counts_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "benchmarks"))

import bench_invariant
import check_invariant


def cases_and_differences(printed: str) -> tuple[int, int]:
    found = re.search(r"^all +([\d,]+) +([\d,]+)$", printed, re.MULTILINE)
    assert found, printed
    return int(found[1]), int(found[2])


def test_cases_that_differ_are_counted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["--device", "cpu", "--cases", "16", "--longest", "60", "--new", "6", "--seed", "1"]
    check_invariant.main(few)
    assert cases_and_differences(capsys.readouterr().out) == (16, 0)
    own = check_invariant.load_model
    monkeypatch.setattr(check_invariant, "load_model", lambda *given: that_counts_rows(own(*given)))
    check_invariant.main([*few, "--without"])
    cases, differ = cases_and_differences(capsys.readouterr().out)
    assert cases == 16 and differ > 0


def test_what_it_costs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    own = bench_invariant.lists_for_a_cpu
    monkeypatch.setattr(bench_invariant, "lists_for_a_cpu", lambda: {n: (p[:3], 2) for n, (p, _) in own().items()})
    bench_invariant.main(["--device", "cpu", "--times", "1"])
    assert len(re.findall(r"\d\.\d\d s +\d+\.\d\d s +-?\d+%", capsys.readouterr().out)) == 3
