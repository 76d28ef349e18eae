"""Results as a table, for those who go on in pandas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from .results import Generation


def as_table(generations: Sequence[Generation]) -> pandas.DataFrame:
    """One row for each; the columns are always the same, but for log-probabilities that nobody asked for."""
    try:
        import pandas as pd
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"to_pandas() needs {missing.name}: pip install 'hf-batchllm[notebook]'", name=missing.name
        ) from None

    def column(values: list[Any], dtype: str) -> pandas.Series:
        return pd.Series(values, dtype=dtype)

    rows = list(generations)
    columns = {
        "index": column([row.index for row in rows], "int64"),
        "sample": column([row.sample for row in rows], "int64"),
        "text": column([row.text for row in rows], "string"),
        "finish_reason": column([row.finish_reason for row in rows], "string"),
        "prompt_tokens": column([len(row.prompt_token_ids) for row in rows], "int64"),
        "new_tokens": column([len(row.token_ids) for row in rows], "int64"),
        "token_ids": column([row.token_ids for row in rows], "object"),
        "prompt_token_ids": column([row.prompt_token_ids for row in rows], "object"),
    }
    for name in ("logprobs", "prompt_logprobs"):
        values = [getattr(row, name) for row in rows]
        if any(value is not None for value in values):
            columns[name] = column(values, "object")
    columns["error"] = column([row.error for row in rows], "string")
    return pd.DataFrame(columns)
