"""Which kind of file a name stands for: JSON lines, CSV, TSV, Parquet, or (as an input) plain text."""

from __future__ import annotations

import os

from ...errors import InputFileError

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
TABLES = ("csv", "tsv", "parquet")
TEXT = "txt"  # a prompt on each line; an input only, as an answer may have several lines
_TEXT_SUFFIX = ".txt"

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")


def format_of(path: str, format: str | None, error: type[Exception]) -> str:
    """``format`` if it is given; else the suffix decides. ``error``: what to raise; InputFileError means an input."""
    reads = error is InputFileError
    if format is not None:
        formats = [*dict.fromkeys(FORMATS.values()), *([TEXT] if reads else [])]
        if format not in formats:
            raise error(f"format {format!r}: it must be one of {', '.join(formats)}")
        return format
    if path == "-":
        return "jsonl"
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _COMPRESSED and reads:
        raise error(f"{path} is compressed: unpack it first, or `zcat {path} | hf-batchllm run - OUT ...`")
    if suffix in _COMPRESSED:
        raise error(f"{path}: results cannot be added to a compressed file: leave {suffix} out, or use `- | gzip`")
    if suffix == _TEXT_SUFFIX:
        if reads:
            return TEXT
        raise error(f"{path}: an answer may have several lines, which a .txt cannot hold: name it .jsonl or .csv")
    if suffix not in FORMATS:
        known = ", ".join([*FORMATS, *([_TEXT_SUFFIX] if reads else [])])
        option = "--format" if reads else "--output-format"
        raise error(f"{path}: its name does not say what it is ({known}): pass the format (`{option} jsonl`)")
    return FORMATS[suffix]
