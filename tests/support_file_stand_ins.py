"""A run from a file to a file that reads, generates and writes with no care."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hf_batchllm.files.record_engine import LineConfig, RecordEngine, line_config
from hf_batchllm.files.records import BadPromptRecord, RecordReader
from hf_batchllm.files.results import ResultWriter, TokenTexts
from hf_batchllm.files.run_options import RunOptions
from hf_batchllm.files.sources import Source

KEY = "0123456789ab"


def run_lines(
    generator: Any, source: Source, reader: RecordReader, *, options: RunOptions, model_name: str = "", **more: Any
) -> tuple[list[bytes], int]:
    tokens = TokenTexts(getattr(generator, "_tokenizer", SimpleNamespace(_tokenizer=None))._tokenizer)
    writer = ResultWriter(
        reader.dialect,
        tokens=tokens,
        token_ids=options.token_ids,
        model=model_name,
        created=7,
        note=more.get("note"),
    )
    generator = generator.gen if isinstance(generator, RecordEngine) else generator
    lines, errors = [], 0
    for number, raw in enumerate(source.records(range(source.count))):
        record = reader.read(number, raw)
        resolved = None if isinstance(record, BadPromptRecord) else line_config(generator, record.settings)
        if isinstance(record, BadPromptRecord) or not isinstance(resolved, LineConfig):
            errors += 1
            bad = record if isinstance(record, BadPromptRecord) else record.bad(str(resolved))
            lines.append(writer.error(bad, KEY))
            continue
        wanted = {} if record.settings.logprobs is None else {"logprobs": record.settings.logprobs}
        seed = record.settings.seed if record.settings.seed is not None else number
        with generator._notices.naming(lambda place, number=number: source.where(number)):
            found = generator.generate(
                [record.prompt], [resolved.config], seed=seed, on_error="record", progress=False, **wanted
            )
        errors += found[0].error is not None
        lines.append(writer.result(record, KEY, list(found)))
    return lines, errors
