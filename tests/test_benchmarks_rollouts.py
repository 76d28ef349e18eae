"""The bench of GRPO's steps: each way trains, and its row says so."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs the extra `trl`")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "benchmarks"))

import bench_rollouts

SMALL = "--device cpu --dtype float32 --steps 2 --prompts 2 --samples 4 --rows 4 --shared 32 --own 8 --new 6".split()


def test_a_row_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    ways = ["generate", "accelerated", "hook"]  # transformers' own batching takes all memory of a CPU
    bench_rollouts.main([*SMALL, "--ways", *ways])
    rows = [line.split() for line in capsys.readouterr().out.partition("reserved\n")[2].splitlines()]
    assert [row[0] for row in rows] == ways
    for _, step, _, rollouts, _, rate, reward, loss in rows:
        assert 0 < float(rollouts) < float(step) and float(rate.replace(",", "")) > 0
        assert 0 < float(reward) < 1 and re.fullmatch(r"[+-]\d\.\d+", loss)


def test_a_way_that_fails_does_not_end_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(bench_rollouts, "run", failing)
    bench_rollouts.main([*SMALL, "--ways", "generate", "hook"])
    assert capsys.readouterr().out.count("RuntimeError: no room") == 2
