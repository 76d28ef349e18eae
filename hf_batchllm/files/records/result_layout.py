"""How a line of results is recognised when a run continues, and which rows it becomes in a table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ..store.output import LineIdentity, ResultLayout

_KEY = re.compile(r"[0-9a-f]{12}")
_BATCH_ID = re.compile(r"batch_req_(\d+)_([0-9a-f]{12})")  # as ``openai_responses`` writes it
_HIGHEST_INDEX = 1 << 48
_NOT_IN_TABLES = ("key", "samples")


def identify(result: dict[str, Any]) -> LineIdentity | None:
    """Of plain results, and of responses as in OpenAI's batches; None for anything else."""
    index, key = result.get("index"), result.get("key")
    if type(index) is int and 0 <= index < _HIGHEST_INDEX and isinstance(key, str) and _KEY.fullmatch(key):
        return index, key, result.get("error") is not None
    name = result.get("id")
    if isinstance(name, str) and "custom_id" in result and (found := _BATCH_ID.fullmatch(name)):
        response = result.get("response")
        status = response.get("status_code") if isinstance(response, dict) else None
        return min(int(found[1]), _HIGHEST_INDEX), found[2], result.get("error") is not None or status != 200
    return None


def table_rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each sample: the fields that all samples share, and the sample's own."""
    shared = {name: value for name, value in result.items() if name not in _NOT_IN_TABLES}
    samples = result.get("samples")
    if not isinstance(samples, list) or not samples:
        yield shared
        return
    for number, sample in enumerate(samples):
        yield {**shared, "sample": number, **(sample if isinstance(sample, dict) else {"text": sample})}


RESULT_LAYOUT = ResultLayout(identify, table_rows, first_columns=("index", "id", "sample"), last_columns=("error",))
