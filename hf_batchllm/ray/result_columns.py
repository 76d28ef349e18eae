"""The results of a block as columns. Which columns there are depends on the options of the call alone.

Files of one dataset must have the same columns, and whoever reads them takes those of the first file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..files.records.prompt_records import BadPromptRecord, PromptRecord
from ..files.records.result_lines import SampleFields
from ..results.generations import Generation

if TYPE_CHECKING:
    import pyarrow

NAMES = (
    *("index", "text", "finish_reason", "prompt_tokens", "new_tokens", "score", "token_ids", "logprobs", "samples"),
    *("adapter", "error", "seed"),
)  # a column of the dataset with such a name gets "input_" before it


@dataclass(frozen=True)
class ResultColumns:
    """``seed``: None where nothing is sampled. ``logprobs``: as in the options."""

    samples: int
    seed: int | None
    beams: bool
    token_ids: bool
    logprobs: int | None
    adapter: bool

    def of(
        self,
        records: Sequence[PromptRecord | BadPromptRecord],
        results: Mapping[int, Sequence[Generation]],  # by the row's number
        fields: SampleFields,
    ) -> dict[str, pyarrow.Array]:
        import pyarrow as pa

        of_sample = self._of_sample()
        types: dict[str, Any] = {"index": pa.int64(), "prompt_tokens": pa.int64()}
        types |= of_sample if self.samples == 1 else {"samples": pa.list_(pa.struct(of_sample))}
        if self.adapter:
            types["adapter"] = pa.string()
        types["error"] = pa.string()
        if self.seed is not None:
            types["seed"] = pa.uint64()
        rows = [self._row(record, results.get(record.number, ()), fields) for record in records]
        return {name: pa.array([row.get(name) for row in rows], type=types[name]) for name in NAMES if name in types}

    def _of_sample(self) -> dict[str, Any]:
        import pyarrow as pa

        types = {"text": pa.string(), "finish_reason": pa.string(), "new_tokens": pa.int64()}
        if self.beams:
            types["score"] = pa.float64()
        if self.token_ids:
            types["token_ids"] = pa.list_(pa.int64())
        if self.logprobs is not None:
            token = {"token_id": pa.int64(), "token": pa.string(), "logprob": pa.float64()}
            more = {"top": pa.list_(pa.struct(token))} if self.logprobs else {}
            types["logprobs"] = pa.list_(pa.struct(token | more))
        return types

    def _row(
        self, record: PromptRecord | BadPromptRecord, samples: Sequence[Generation], fields: SampleFields
    ) -> dict[str, Any]:
        row: dict[str, Any] = {"index": record.number, "seed": self.seed}
        if isinstance(record, BadPromptRecord):
            return row | {"error": str(record)}
        why = next((sample.error for sample in samples if sample.error is not None), None)
        if why is not None:
            return row | {"error": f"row {record.number}: the prompt {why}"}
        made = [_writable(fields.of(sample, self.logprobs)) for sample in samples]
        row |= {"prompt_tokens": len(samples[0].prompt_token_ids), "adapter": samples[0].adapter}
        return row | (made[0] if self.samples == 1 else {"samples": made})


def _writable(sample: dict[str, Any]) -> dict[str, Any]:
    """Half a character, as a tokenizer may give, cannot be written as UTF-8."""
    text = sample["text"]
    return sample if text is None else sample | {"text": text.encode("utf-8", "replace").decode()}
