"""Results as a table, for those who go on in pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from .results import Generation


def as_table(generations: Sequence[Generation]) -> pandas.DataFrame:
    """One row for each; the columns are always the same, but for log-probabilities that nobody asked for."""
    rows = list(generations)
    columns: dict[str, tuple[str, list[Any]]] = {
        "index": ("int64", [row.index for row in rows]),
        "sample": ("int64", [row.sample for row in rows]),
        "text": ("string", [row.text for row in rows]),
        "finish_reason": ("string", [row.finish_reason for row in rows]),
        "prompt_tokens": ("int64", [len(row.prompt_token_ids) for row in rows]),
        "new_tokens": ("int64", [len(row.token_ids) for row in rows]),
        "token_ids": ("object", [row.token_ids for row in rows]),
        "prompt_token_ids": ("object", [row.prompt_token_ids for row in rows]),
    }
    for name in ("logprobs", "prompt_logprobs"):
        values = [getattr(row, name) for row in rows]
        if any(value is not None for value in values):
            columns[name] = ("object", values)
    columns["error"] = ("string", [row.error for row in rows])
    return table_of(columns)


def table_of(columns: Mapping[str, tuple[str, list[Any]]]) -> pandas.DataFrame:
    """By the columns' names: their dtype and their values."""
    try:
        import pandas as pd
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"to_pandas() needs {missing.name}: pip install 'hf-batchllm[notebook]'", name=missing.name
        ) from None
    return pd.DataFrame({name: pd.Series(values, dtype=dtype) for name, (dtype, values) in columns.items()})
