"""A run from a file to a file that reads, generates and writes with no care."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hf_batchllm.files.records.answers import Writer
from hf_batchllm.files.records.line_configs import LineConfigs
from hf_batchllm.files.records.records import BadPromptRecord, Reader
from hf_batchllm.files.records.token_texts import TokenTexts
from hf_batchllm.files.store.sources import Source

KEY = "0123456789ab"


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

    def run_file(self, gen: Any, source: Source, target: str, *, reader: Reader, **more: Any) -> Summary:
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
    generator: Any, source: Source, reader: Reader, *, token_ids: bool = False, model_name: str = "", **more: Any
) -> tuple[list[bytes], int]:
    tokens = TokenTexts(getattr(generator, "_tokenizer", SimpleNamespace(_tokenizer=None))._tokenizer)
    writer = Writer(
        reader.dialect,
        tokens=tokens,
        token_ids=token_ids,
        model=model_name,
        created=7,
        where=source.where,
        note=more.get("note"),
    )
    configs = LineConfigs.of(generator)
    lines, errors = [], 0
    for number, raw in enumerate(source.records(range(source.count))):
        item = reader.read(number, raw)
        why = None if isinstance(item, BadPromptRecord) else configs.problem(item.settings)
        if isinstance(item, BadPromptRecord) or why is not None:
            errors += 1
            lines.append(writer.error(item, KEY, why))
            continue
        wanted = {} if item.settings.logprobs is None else {"logprobs": item.settings.logprobs}
        seed = item.settings.seed if item.settings.seed is not None else number
        config = configs.config(item.settings)
        found = generator.generate([item.prompt], [config], seed=seed, on_error="record", progress=False, **wanted)
        errors += found[0].error is not None
        lines.append(writer.result(item, KEY, list(found)))
    return lines, errors
