"""The bar of a file: one for all of its calls, and it counts from what an earlier run has done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, run_file


@pytest.mark.parametrize("window_bytes", [256 << 20, 1200], ids=["one window", "several windows"])
def test_a_resumed_file_counts_from_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], window_bytes: int
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": f"w{3 + number} w5 w6", "max_new_tokens": 2 + number % 2} for number in range(12)]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"prompt": None}]))
    with BatchGenerator(build("llama"), word_tokenizer(97)) as generator:
        run_file(generator, source, target, limit=5, seed=1, progress=False)
        assert not capsys.readouterr().err
        run_file(generator, source, target, seed=1, progress=True, window_bytes=window_bytes)
    drawn = [line for line in capsys.readouterr().err.replace("\n", "\r").split("\r") if line.strip()]
    assert "5 of 13 done before" in drawn[0] and drawn[0].startswith(" 38%")
    assert drawn[-1].startswith("100%") and drawn[-1].rstrip().endswith("13 / 13 done (5 before)")
