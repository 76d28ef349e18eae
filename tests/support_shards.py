"""What the tests of parts share: a run in four parts, files as jobs leave them, and ways to die."""

from __future__ import annotations

import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support_families import build
from support_file_lines import records, write_lines
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, run_file

SETTINGS: dict[str, Any] = {"max_new_tokens": 4, "progress": False}
COUNT = 60


@pytest.fixture(scope="module")
def generator() -> Iterator[BatchGenerator]:
    with BatchGenerator(build("llama"), word_tokenizer(97, template=True)) as made:
        yield made


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, generator: BatchGenerator) -> Path:
    """A folder in which the four parts of a sampled run are complete, and ``whole.jsonl``, by one run."""
    folder = tmp_path_factory.mktemp("parts")
    source = write_lines(folder / "in.jsonl", records(COUNT), broken=(31,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in range(1, 5):
            run_file(generator, source, folder / "out.jsonl", shard=f"{part}/4", temperature=0.9, **SETTINGS)
        seed = record_of(folder / "out.jsonl.shard-1-of-4.jsonl")["seed"]
        run_file(generator, source, folder / "whole.jsonl", seed=seed, temperature=0.9, **SETTINGS)
    return folder


@pytest.fixture
def folder(parts: Path, tmp_path: Path) -> Path:
    """A copy of ``parts`` that a test may change."""
    return Path(shutil.copytree(parts, tmp_path / "parts"))


def part_file(folder: Path, part: int, of: int = 4, name: str = "out.jsonl") -> Path:
    return folder / f"{name}.shard-{part}-of-{of}.jsonl"


def record_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(f"{path}.run.json").read_text())
    return found


def change_record(path: Path, **changes: Any) -> None:
    Path(f"{path}.run.json").write_text(json.dumps({**record_of(path), **changes}))


def shortened(path: Path, lines: int) -> None:
    """As a job leaves it that was killed after so many results, and a piece of one."""
    found = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(found[:lines]) + found[lines][:20])
    change_record(path, finished=None, results=None, figures={})


def again(
    generator: BatchGenerator, folder: Path, shard: str | None = None, name: str = "out.jsonl", **more: Any
) -> Any:
    """A part is run again, or the whole file."""
    given = {"temperature": 0.9, **SETTINGS, **more}
    return run_file(generator, folder / "in.jsonl", folder / name, shard=shard, **given)


def dying(call: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def counted(*given: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given)

    return counted
