"""Lines that are run over a tiny model, and their results."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, FileReport, run_file

KEY = "0123456789ab"
SETTINGS: dict[str, Any] = {"max_new_tokens": 4, "seed": 5, "progress": False}


@pytest.fixture(scope="module")
def generator() -> Iterator[BatchGenerator]:
    with BatchGenerator(build("llama"), word_tokenizer(97, template=True)) as made:
        yield made


def write_lines(path: Path, lines: Iterable[Any], broken: Container[int] = ()) -> Path:
    """``lines``: records, or the text of a line. ``broken``: those that are no JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text if place not in broken else text[:6]}\n" for place, text in enumerate(texts)))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def reported(
    gen: BatchGenerator, folder: Path, lines: Iterable[Any], **settings: Any
) -> tuple[FileReport, list[dict[str, Any]]]:
    source = write_lines(folder / "in.jsonl", lines)
    report = run_file(gen, source, folder / "out.jsonl", **{**SETTINGS, **settings})
    return report, results(folder / "out.jsonl")


def answered(gen: BatchGenerator, folder: Path, lines: Iterable[Any], **settings: Any) -> list[dict[str, Any]]:
    return reported(gen, folder, lines, **settings)[1]


def request(body: dict[str, Any], custom_id: Any = "a", url: str = "/v1/completions") -> dict[str, Any]:
    """A request of an OpenAI batch."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def records(count: int, seed: int = 1, bad: bool = True) -> list[dict[str, Any]]:
    """Prompts that share documents; some sampled, some several times, some with settings of their own, some bad."""
    rng = random.Random(seed)

    def words(size: int) -> str:
        return " ".join(f"w{rng.randrange(3, 97)}" for _ in range(size))

    documents = [words(30) for _ in range(max(count // 25, 1))]
    made: list[dict[str, Any]] = []
    for number in range(count):
        record: dict[str, Any] = {"prompt": f"{rng.choice(documents)} {words(rng.randrange(1, 9))}"}
        if number % 3 == 0:
            record["id"] = f"record-{number}"
        if number % 4 == 0:
            record["temperature"] = 0.7
        if number % 12 == 0:
            record["n"] = 3
        if number % 7 == 0:
            record["max_new_tokens"] = 1 + number % 9
        if bad and number % 40 == 13:
            record = {"prompt": None, "id": number}
        made.append(record)
    return made


def in_a_child(work: Callable[[], object]) -> int:
    """The process id of a copy of this one that does ``work`` and nothing else."""
    child = os.fork()
    if child == 0:
        code = 9
        try:
            signal.alarm(60)
            work()
            code = 0
        finally:
            os._exit(code)
    return child
