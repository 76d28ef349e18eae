"""Results as a pandas DataFrame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


def table_of(columns: Mapping[str, tuple[str, list[Any]]]) -> pandas.DataFrame:
    """``columns``: name -> (dtype, values)."""
    try:
        import pandas as pd
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"to_pandas() needs {missing.name}: pip install 'hf-batchllm[notebook]'", name=missing.name
        ) from None
    return pd.DataFrame({name: pd.Series(values, dtype=dtype) for name, (dtype, values) in columns.items()})
