"""A file of prompts, as numbered records that are read from the disk when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np


def record_key(raw: bytes) -> str:
    """12 hex digits that name the content of a record."""
    raise NotImplementedError


def open_source(path: str, format: str | None = None, *, note: Callable[[str], None] | None = None) -> Source:
    """``format``: jsonl, csv, tsv or parquet; else the suffix says. ``-`` is stdin (jsonl)."""
    raise NotImplementedError


class Source:
    path: str
    format: str
    count: int  # records
    bytes: int  # in all records
    digest: str  # of everything that was read
    problems: dict[int, str]  # rows of a table that are no records: number -> why (their bytes are a JSON object still)

    def records(self, numbers: Sequence[int] | np.ndarray) -> list[bytes]:
        """The raw JSON of these records, in the order asked for."""
        raise NotImplementedError

    def where(self, number: int) -> str:
        """``line 17`` or ``row 17``."""
        raise NotImplementedError

    def windows(
        self,
        numbers: np.ndarray | None = None,
        window_bytes: int = 256 << 20,
        prompt_of: Callable[[bytes], bytes | str | None] | None = None,
    ) -> Iterator[np.ndarray]:
        """All of ``numbers`` in stretches that fit into memory; records that begin alike are in the same one."""
        raise NotImplementedError

    def close(self) -> None: ...
