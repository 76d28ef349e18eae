"""The measure of agreement: what it says of rollouts that agree, and of some that do not."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support_bench import settings_of_others as settings_of_others  # a fixture

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "benchmarks"))

import bench_agreement

SMALL = ["--device", "cpu", "--dtype", "float32", "--prompts", "2", "--samples", "2", "--prompt", "9", "--new", "4"]


def rows_of(printed: str) -> dict[str, list[float]]:
    lines = [re.split(r"\s{2,}", line) for line in printed.splitlines()]
    return {
        line[0]: [float(each.rstrip("%").replace(",", "")) for each in line[1:]] for line in lines if len(line) == 6
    }


def test_in_float32_all_agree(capsys: pytest.CaptureFixture[str]) -> None:
    ways = ["BatchGenerator", "generate"]  # transformers' own batching takes all memory of a CPU
    bench_agreement.main([*SMALL, "--ways", *ways])
    found = rows_of(capsys.readouterr().out.partition("bias\n")[2])
    assert list(found) == ways
    for tokens, off, mean, largest, bias in found.values():
        assert tokens == 2 * 2 * 4 and off == 0 and mean < 1e-4 and largest <= 1e-3 and abs(bias) < 1e-4


def test_what_is_off_is_seen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    by_us = bench_agreement.by_us

    def off(*given: Any) -> Any:
        rows = by_us(*given)
        for row in rows:
            row.logprobs[0] -= 0.2  # one token of four
        return rows

    monkeypatch.setitem(bench_agreement.WAYS, "BatchGenerator", off)
    bench_agreement.main([*SMALL, "--ways", "BatchGenerator"])
    (found,) = rows_of(capsys.readouterr().out.partition("bias\n")[2]).values()
    assert found[1:] == [
        25.0,
        pytest.approx(0.05, abs=1e-3),
        pytest.approx(0.2, abs=1e-3),
        pytest.approx(0.05, abs=1e-3),
    ]


def test_heads_are_narrowed_to_the_entropy_that_was_asked_for() -> None:
    import torch

    from hf_batchllm.bench.models import load_model

    model = load_model(None, "tiny", torch.device("cpu"), torch.float32)
    bench_agreement.narrow(model, [[1, 2, 3, 4, 5]], 1.0)
    logits = model(torch.tensor([[1, 2, 3, 4, 5]])).logits[0]
    assert torch.distributions.Categorical(logits=logits).entropy().mean().item() == pytest.approx(1.0, abs=1e-3)
