"""Results as a table: a pandas DataFrame, lines of JSON, or a dataset of Hugging Face's.

A table is a dict, name -> (kind, values). Kinds: "int64", "float64", "bool", "string"; "ids" (token ids), "logprobs"
(of tokens, or a dict of likely tokens for each place) and "prompt" (text and chats).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..wording import is_array

if TYPE_CHECKING:
    import datasets
    import pandas

Columns = Mapping[str, tuple[str, list[Any]]]
_PLAIN = ("int64", "float64", "bool", "string")
_KINDS = {  # all other columns are text
    "int64": "index sample choice prompt_tokens new_tokens tokens",
    "float64": "logprob mean_logprob score",
    "bool": "is_greedy",
    "logprobs": "logprobs prompt_logprobs",
    "ids": "token_ids prompt_token_ids",
    "prompt": "prompt context",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}
_COUNTS = {"prompt_tokens": "prompt_token_ids", "new_tokens": "token_ids", "tokens": "token_ids"}


def columns_of(rows: Sequence[Any], fields: str, ids: bool) -> Columns:
    """``fields``: in their order; with a "?", one that is a column if any row has it. ``ids``: whether ids are."""
    columns = {}
    for field in fields.split():
        name = field.removesuffix("?")
        kind = _KIND_OF.get(name, "string")
        values = [getattr(row, _COUNTS.get(name, name)) for row in rows]
        if (kind == "ids" and not ids) or (name != field and all(value is None for value in values)):
            continue
        if kind == "prompt" and not any(isinstance(value, list) for value in values):
            kind = "string"  # as in most lists
        columns[name] = (kind, list(map(len, values)) if name in _COUNTS else values)
    return columns


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
    kinds = {name: kind if kind in _PLAIN else "object" for name, (kind, _) in columns.items()}
    frame = pd.DataFrame({name: pd.Series(values, dtype=kinds[name]) for name, (_, values) in columns.items()})
    if index is not None:
        frame.index = index.take(columns["index"][1])
    return frame


def _lacking(what: str, missing: ModuleNotFoundError, install: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"{what} needs {missing.name}: pip install {install}", name=missing.name)


def write_json_lines(columns: Columns, path: str | os.PathLike[str]) -> None:
    # Half a character, as a tokenizer may give, cannot be written as UTF-8.
    with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        for row in zip(*(values for _, values in columns.values()), strict=True):
            file.write(_in_json(dict(zip(columns, row, strict=True))) + "\n")


def _in_json(record: Any) -> str:
    """JSON has no numbers for NaN and infinity: null stands for them."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False, default=_described)
    except ValueError:
        return _in_json(json.loads(json.dumps(record, default=_described), parse_constant=lambda _: None))


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


def dataset_of(columns: Columns) -> datasets.Dataset:
    try:
        import datasets as hf
        import pyarrow as pa
    except ModuleNotFoundError as missing:
        raise _lacking("to_dataset()", missing, "datasets") from None
    arrays = {}
    for name, (kind, values) in columns.items():
        if kind == "prompt":
            arrays[name] = pa.array(_of_one_kind(values))
            continue
        each = pa.list_(pa.struct({"token_id": pa.int64(), "logprob": pa.float64()}))
        if kind == "logprobs" and any(row and isinstance(row[0], float) for row in values):
            each = pa.float64()
        elif kind == "logprobs":
            values = [row and [_with_names(place) for place in row] for row in values]
        types = {"ids": pa.list_(pa.int64()), "logprobs": pa.list_(each), "bool": pa.bool_()}
        arrays[name] = pa.array(values, type=types.get(kind, kind))
    return hf.Dataset(pa.table(arrays))


def _with_names(logprobs: Mapping[int, float] | None) -> list[dict[str, float]] | None:
    """A dict by token id as a list: a dataset would make a column of each token."""
    return None if logprobs is None else [{"token_id": token, "logprob": value} for token, value in logprobs.items()]


def _of_one_kind(prompts: list[Any]) -> list[Any]:
    """Chats; where there are strings among them, or parts of several kinds, all as text: chats then are JSON."""
    if all(
        isinstance(prompt, list) and all(isinstance(value, str) for message in prompt for value in message.values())
        for prompt in prompts
        if prompt is not None
    ):
        return prompts
    return [
        json.dumps(each, ensure_ascii=False, default=_described) if isinstance(each, list) else each for each in prompts
    ]
