"""Files in, files out: what single lines may say without harm to the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from families import build
from words import word_tokenizer

from hf_batchllm import BatchGenerator, run_file

SETTINGS: dict[str, Any] = {"max_new_tokens": 4, "seed": 5, "progress": False}


@pytest.fixture(scope="module")
def generator() -> Iterator[BatchGenerator]:
    with BatchGenerator(build("llama"), word_tokenizer(97, template=True)) as made:
        yield made


def answered(gen: BatchGenerator, folder: Path, lines: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run_file(gen, folder / "in.jsonl", folder / "out.jsonl", **{**SETTINGS, **settings})
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_values_that_transformers_has_no_words_for(tmp_path: Path, generator: BatchGenerator) -> None:
    lines = [
        {"prompt": "w5 w6"},
        {"prompt": "w5 w6", "exponential_decay_length_penalty": [1, 1.5]},  # there is no EOS
        {"prompt": "w5 w6", "exponential_decay_length_penalty": [1, 1.5], "eos_token_id": [7, 6000]},
        {"prompt": "w5 w6", "forced_eos_token_id": [6, 6000]},
        {"prompt": "w5", "forced_bos_token_id": 6000},
    ]
    good, *bad = answered(generator, tmp_path, lines)
    assert good["new_tokens"] == 4
    assert "settings that cannot be used" in bad[0]["error"]
    for each, name in zip(bad[1:], ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id"), strict=True):
        assert f"`{name}` has token 6000, outside the model's vocabulary" in each["error"]
