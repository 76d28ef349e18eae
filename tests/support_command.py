"""What the tests of the command share: a saved model, files of records, and what a command says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support_accelerated import word_tokenizer
from support_families import build

import hf_batchllm
from hf_batchllm.cli import main

ROOT = Path(hf_batchllm.__file__).parents[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    build("llama").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def write(*records: Any, name: str = "in.jsonl") -> str:
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        return name

    return write


def results(name: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of a command that cannot be used."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and "Traceback" not in err
    said = re.search(r"^hf-batchllm( \w+)?: error: (.*)\n\Z", err, re.MULTILINE | re.DOTALL)
    assert said is not None, err
    return said[2]


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*given: Any, **named: Any) -> None:
        raise error

    return fail
