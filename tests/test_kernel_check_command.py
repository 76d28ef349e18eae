"""The command ``hf-batchllm check``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support_broken_kernels import broken
from support_kernel_check import CPU
from support_kernel_check import nothing_remembered as nothing_remembered  # a fixture of all tests here
from support_kernels import INTERPRETED, plain

from hf_batchllm.cli import main
from hf_batchllm.kernel_check import run_in_child, verdicts
from hf_batchllm.kernel_check.outcomes import NO_ROOM, WRONG, Outcome
from hf_batchllm.kernel_check.verdicts import Verdicts


@plain
def test_the_command_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(monkeypatch, tmp_path, "wrong", "layer_ops_triton.act_and_mul")
    assert main(["check", "--only", "layers", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "triton:" in text and "norm" in text and "2 failed" in text
    lines = [line for line in text.splitlines() if line.strip().startswith("activation")]
    assert len(lines) == 2 and all("wrong" in line for line in lines)
    assert Verdicts(tmp_path / "cache" / "kernel-checks").read(verdicts.key_of(CPU), "layers")


@plain
@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETED, reason="is about a machine without a GPU")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "--device cuda: "),
        (["--device", "cpu"], "need a CUDA GPU"),
        (["--device", "gpu"], "--device gpu: "),
        (["--only", "x"], "'x'"),
    ],
)
def test_where_there_is_nothing_to_check(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 2
    assert why in capsys.readouterr().err


@plain
def test_a_failure_is_not_hidden_by_want_of_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(monkeypatch, tmp_path, None)
    found = [Outcome("norm", WRONG, "off by far"), Outcome("activation", NO_ROOM, "OutOfMemoryError")]
    monkeypatch.setattr(run_in_child, "outcomes", lambda *given, **named: iter(found))
    assert main(["check", "--only", "layers", "--device", "cpu"]) == 1
    assert "1 failed" in capsys.readouterr().out
    assert "off by far" in str(Verdicts().read(verdicts.key_of(CPU), "layers"))
