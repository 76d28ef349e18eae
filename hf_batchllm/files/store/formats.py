"""Which kind of file a name stands for: JSON lines, CSV, TSV or Parquet."""

from __future__ import annotations

import os

from ...errors import InputFileError

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
TABLES = ("csv", "tsv", "parquet")

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")


def format_of(path: str, format: str | None, error: type[Exception]) -> str:
    """``format`` if it is given; else the suffix decides. ``error``: what to raise; InputFileError means an input."""
    if format is not None:
        if format not in FORMATS.values():
            raise error(f"format {format!r}: it must be one of {', '.join(dict.fromkeys(FORMATS.values()))}")
        return format
    if path == "-":
        return "jsonl"
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _COMPRESSED and error is InputFileError:
        raise error(f"{path} is compressed: unpack it first, or `zcat {path} | hf-batchllm run - OUT ...`")
    if suffix in _COMPRESSED:
        raise error(f"{path}: results cannot be added to a compressed file: leave {suffix} out, or use `- | gzip`")
    if suffix not in FORMATS:
        known = ", ".join(FORMATS)
        raise error(f"{path}: its name does not say what it is ({known}): pass the format (`--format jsonl`)")
    return FORMATS[suffix]
