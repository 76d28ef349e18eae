"""A row of a dataset -> a prompt, or the reason why it has none; by the rules of files."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError
from ..files.records.prompt_records import BadPromptRecord, PromptRecord, RecordLayout
from ..files.records.record_reader import RecordReader
from ..files.store.table_inputs import plain
from ..wording import shown
from .plan_rows import words_of

if TYPE_CHECKING:
    import pyarrow

ROW = "hf_batchllm_row"  # the column with a row's number in the whole dataset
_USUAL = ("prompt", "messages")


def row_name(number: int) -> str:
    return f"row {number}"


@dataclass(frozen=True)
class RowReader:
    """``columns``: those that prompts are made of."""

    layout: RecordLayout
    columns: tuple[str, ...]

    def read(self, table: pyarrow.Table, numbers: Sequence[int]) -> Iterator[PromptRecord | BadPromptRecord]:
        """``numbers``: of the rows of ``table``, in the whole dataset."""
        rows = table.select(list(self.columns)).to_pylist(maps_as_pydicts="strict")
        for number, row in zip(numbers, rows, strict=True):
            # Through JSON, as a row of a Parquet file goes: a prompt means the same here and there.
            yield self._reader.read(number, json.dumps({name: plain(value) for name, value in row.items()}).encode())

    def words(self, table: pyarrow.Table) -> tuple[np.ndarray, np.ndarray]:
        """What stands for the tokens of all prompts, one after the other, and where each of them ends."""
        records = self.read(table, range(table.num_rows))
        each = [words_of(record.prompt if isinstance(record, PromptRecord) else "") for record in records]
        ends = np.cumsum([len(words) for words in each], dtype=np.int64)
        return np.concatenate([np.empty(0, np.int32), *each]), ends

    @cached_property
    def _reader(self) -> RecordReader:
        return RecordReader(self.layout, where=row_name)


def reader_of(layout: RecordLayout, names: Sequence[str]) -> RowReader:
    """``names``: the columns of the dataset; ConfigError if prompts are made of others."""
    if layout.template is not None:
        if layout.prompt_field is not None:
            raise ConfigError("`template` and `prompt_column` are two ways to say what the prompt is: keep one")
        wanted = [field if field in names else field.partition(".")[0] for field in layout.template.fields]
    elif layout.prompt_field is not None:
        wanted = [layout.prompt_field]
    else:
        wanted = [name for name in _USUAL if name in names]
        if len(wanted) != 1:
            have = "both `prompt` and `messages`" if wanted else f"no column `prompt` or `messages`{_those(names)}"
            raise ConfigError(f"the dataset has {have}: pass prompt_column=, or a template=")
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"the dataset has no column {shown(name)}{_those(names)}{hint}")
    return RowReader(layout, tuple(dict.fromkeys(wanted)))


def _those(names: Sequence[str]) -> str:
    return f" (it has {', '.join(names)})" if names else ""
