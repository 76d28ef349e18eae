"""Stand-ins for the storage of files: a source in memory, and a run that reads, generates and writes with no care."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hf_batchllm.files.answers import Writer
from hf_batchllm.files.line_configs import LineConfigs
from hf_batchllm.files.records import BadItem, Reader
from hf_batchllm.files.token_texts import TokenTexts


class MemorySource:
    def __init__(self, path: str, format: str | None = None, *, note: Any = None) -> None:
        self.path, self.problems = path, {}
        self.format = format or Path(path).suffix.lstrip(".") or "jsonl"
        text = Path(path).read_bytes()
        if self.format == "csv":
            rows = csv.DictReader(text.decode().splitlines())
            self._lines = [(number + 2, json.dumps(row).encode()) for number, row in enumerate(rows)]
        else:
            lines = enumerate(text.split(b"\n"), 1)
            self._lines = [(number, line) for number, line in lines if line.strip()]
        self.count = len(self._lines)

    def records(self, numbers: Sequence[int]) -> list[bytes]:
        return [self._lines[number][1] for number in numbers]

    def where(self, number: int) -> str:
        return f"line {self._lines[number][0]}"

    def windows(self, numbers: Any = None, window_bytes: int = 0, prompt_of: Any = None) -> Iterator[np.ndarray]:
        numbers = np.arange(self.count) if numbers is None else numbers
        for raw in self.records(numbers.tolist()):
            assert isinstance(prompt_of(raw), str)
        size = len(numbers) if window_bytes > 1000 else 2
        for begin in range(0, len(numbers), max(size, 1)):
            yield numbers[begin : begin + size]

    def close(self) -> None:
        pass


@dataclass
class Summary:
    errors: int = 0
    text: str = "done"

    def __str__(self) -> str:
        return self.text


@dataclass
class Runs:
    """What the stand-in was called with."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    fail: Callable[[Any], None] | None = None  # raises, once the model is there

    def run_file(self, gen: Any, source: MemorySource, target: str, *, reader: Reader, **more: Any) -> Summary:
        self.calls.append({"reader": reader, **more})
        generator = gen()
        try:
            if self.fail is not None:
                self.fail(generator)
            lines, errors = run_lines(generator, source, reader, **more)
        finally:
            generator.close()
        Path(target).write_bytes(b"".join(line + b"\n" for line in lines))
        return Summary(errors)


def run_lines(
    generator: Any, source: MemorySource, reader: Reader, *, token_ids: bool = False, model_name: str = "", **more: Any
) -> tuple[list[bytes], int]:
    tokens = TokenTexts(getattr(generator, "_tokenizer", SimpleNamespace(_tokenizer=None))._tokenizer)
    writer = Writer(
        reader.dialect, tokens=tokens, token_ids=token_ids, model=model_name, created=7, note=more.get("note")
    )
    configs = LineConfigs.of(generator)
    lines, errors = [], 0
    for number, raw in enumerate(source.records(range(source.count))):
        item = reader.read(number, raw)
        why = None if isinstance(item, BadItem) else configs.problem(item.settings)
        if isinstance(item, BadItem) or why is not None:
            errors += 1
            lines.append(writer.error(item, "k", why))
            continue
        wanted = {} if item.settings.logprobs is None else {"logprobs": item.settings.logprobs}
        seed = item.settings.seed if item.settings.seed is not None else number
        config = configs.config(item.settings)
        found = generator.generate([item.prompt], [config], seed=seed, on_error="record", progress=False, **wanted)
        errors += found[0].error is not None
        lines.append(writer.result(item, "k", list(found)))
    return lines, errors
