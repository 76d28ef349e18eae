"""Results as a table: a pandas DataFrame, lines of JSON, or a dataset of Hugging Face's.

A table is a dict, name -> (kind, values). Kinds: "int64", "float64", "bool", "string"; "ids" (token ids), "logprobs"
(of tokens, or a dict of likely tokens for each place) and "prompt" (text and chats).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..wording import is_array

if TYPE_CHECKING:
    import datasets
    import pandas

Columns = Mapping[str, tuple[str, list[Any]]]


def prompt_column(prompts: list[Any]) -> tuple[str, list[Any]]:
    """Prompts are text in most lists: then their column is."""
    return ("prompt" if any(isinstance(prompt, list) for prompt in prompts) else "string"), prompts


def index_of(prompts: Any) -> Any:
    """The index of a pandas Series of prompts; None for all else. A Series of token ids is one prompt."""
    pandas = sys.modules.get("pandas")  # where it is not loaded, nothing is a Series
    if pandas is None or not isinstance(prompts, pandas.Series) or prompts.dtype.kind in "iu":
        return None
    return prompts.index


def table_of(columns: Columns, index: Any) -> pandas.DataFrame:
    """``index``: of the prompts, where they were a Series."""
    try:
        import pandas as pd
    except ModuleNotFoundError as missing:
        raise _lacking("to_pandas()", missing, "'hf-batchllm[notebook]'") from None
    plain = ("int64", "float64", "bool", "string")
    made = {
        name: pd.Series(values, dtype=kind if kind in plain else "object") for name, (kind, values) in columns.items()
    }
    frame = pd.DataFrame(made)
    if index is not None:
        frame.index = index.take(columns["index"][1])
    return frame


def _lacking(what: str, missing: ModuleNotFoundError, install: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"{what} needs {missing.name}: pip install {install}", name=missing.name)


def write_json_lines(columns: Columns, path: str | os.PathLike[str]) -> None:
    names = list(columns)
    # Half a character, as a tokenizer may give, cannot be written as UTF-8.
    with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        for row in zip(*(values for _, values in columns.values()), strict=True):
            record = {name: _in_json(value) for name, value in zip(names, row, strict=True)}
            file.write(json.dumps(record, ensure_ascii=False, allow_nan=False, default=_described) + "\n")


def _described(value: Any) -> Any:
    """What JSON has of an object in a chat. Of an image that is its size, as a row is no place for its pixels."""
    pictures = sys.modules.get("PIL.Image")  # where it is not loaded, nothing is a picture
    if pictures is not None and isinstance(value, pictures.Image):
        return {"width": value.width, "height": value.height}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": len(value)}
    if is_array(value) and value.ndim:
        return {"shape": list(value.shape)}
    return str(value)


def _in_json(value: Any) -> Any:
    """JSON has no numbers for NaN and infinity: null stands for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _in_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        # Token ids are many, and as they are.
        return value if value and isinstance(value[0], int) else [_in_json(each) for each in value]
    return value


def dataset_of(columns: Columns) -> datasets.Dataset:
    try:
        import datasets as hf
        import pyarrow as pa
    except ModuleNotFoundError as missing:
        raise _lacking("to_dataset()", missing, "datasets") from None
    plain = {"int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_(), "string": pa.string()}
    arrays = {}
    for name, (kind, values) in columns.items():
        if kind in plain:
            arrays[name] = pa.array(values, type=plain[kind])
        elif kind == "ids":
            arrays[name] = pa.array(values, type=pa.list_(pa.int64()))
        elif kind == "logprobs":
            each = pa.list_(pa.struct({"token_id": pa.int64(), "logprob": pa.float64()}))
            given = [_with_names(row) for row in values]
            of_tokens = any(row and isinstance(row[0], float) for row in values)
            arrays[name] = pa.array(given, type=pa.list_(pa.float64() if of_tokens else each))
        else:
            arrays[name] = pa.array(_of_one_kind(values))
    return hf.Dataset(pa.table(arrays))


def _with_names(row: Sequence[Any] | None) -> Any:
    """Dicts by token id as lists: a dataset would make a column of each token."""
    if row is None or (row and isinstance(row[0], float)):
        return row
    return [
        None if place is None else [{"token_id": token, "logprob": value} for token, value in place.items()]
        for place in row
    ]


def _of_one_kind(prompts: list[Any]) -> list[Any]:
    """Chats; where there are strings among them, or parts of several kinds, all as text: chats then are JSON."""
    given = [prompt for prompt in prompts if prompt is not None]
    simple = all(
        isinstance(prompt, list) and all(isinstance(value, str) for message in prompt for value in message.values())
        for prompt in given
    )
    if simple:
        return prompts
    return [
        json.dumps(each, ensure_ascii=False, default=_described) if isinstance(each, list) else each for each in prompts
    ]
