"""An actor of Ray's: it loads the model once, and runs a block at a time."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import BatchConfig
from ..errors import ConfigError
from ..files.records.prompt_records import PromptRecord
from ..files.records.result_lines import SampleFields
from ..files.records.token_texts import TokenTexts
from ..inputs.processors_and_criteria import factory_of
from ..pool.loaders import load_in_worker
from .result_columns import NAMES, ResultColumns
from .rows import ROW, RowReader, row_name

if TYPE_CHECKING:
    import pyarrow
    from transformers import GenerationConfig

_BROKEN = 70  # the status of a process that ends since its device has failed
_BY_PLACE = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")  # functions that get it first


@dataclass(frozen=True)
class WorkerCall:
    """What all workers of a call are told. ``options``: of generate, by its own names."""

    load: Callable[[], Any]
    tokenizer: Any
    config: BatchConfig
    device: str
    reader: RowReader
    generation_config: GenerationConfig | None
    options: dict[str, Any]
    seed: int
    token_ids: bool
    seed_given: bool = True


class Worker:
    def __init__(self, call: WorkerCall) -> None:
        import torch

        from ..generator import BatchGenerator
        from .call_options import resolved

        if call.device != "cpu" and not torch.cuda.is_available():
            raise ConfigError(
                "Ray gave this worker a GPU, and PyTorch sees none: install a PyTorch for this GPU there, or pass "
                "num_gpus=0 for the CPU"
            )
        self._call = call
        self._gen = BatchGenerator(*load_in_worker(call.load, call.tokenizer, call.device), call.config)
        options = resolved(self._gen, call.generation_config, call.options, call.seed if call.seed_given else None)
        self._columns = ResultColumns(
            samples=options.num_return_sequences,
            seed=call.seed if options.do_sample else None,
            beams=options.num_beams > 1,
            token_ids=call.token_ids,
            logprobs=call.options.get("logprobs"),
            adapter="adapter" in call.options,
        )
        self._fields: SampleFields | None = None

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        try:
            return self._answered(table)
        except Exception as error:
            from ..model.device_memory import is_device_error

            if is_device_error(error):
                # No later block could use the device. Ray starts another actor, which runs this block again.
                traceback.print_exc()
                os._exit(_BROKEN)
            raise

    def _answered(self, table: pyarrow.Table) -> pyarrow.Table:
        """The table, with a column for each field of the results."""
        numbers: list[int] = table[ROW].to_pylist()
        records = list(self._call.reader.read(table, numbers))
        results = self._generated([record for record in records if isinstance(record, PromptRecord)])
        if self._fields is None:  # a tokenizer is loaded by the first prompt that needs it
            self._fields = SampleFields(TokenTexts(self._gen.tokenizer), self._call.token_ids)
        made = table.drop_columns([ROW])
        made = made.rename_columns([f"input_{name}" if name in NAMES else name for name in made.column_names])
        for name, column in self._columns.of(records, results, self._fields).items():
            made = made.append_column(name, column)
        return made

    def _generated(self, records: Sequence[PromptRecord]) -> dict[int, list[Any]]:
        from ..inputs.seeds import SeedOfWhole

        call, numbers = self._call, [record.number for record in records]
        if not records:
            return {}
        with self._gen._notices.naming(lambda place: row_name(numbers[place])):
            generations = self._gen.generate(
                [record.prompt for record in records],
                call.generation_config,
                seed=SeedOfWhole(call.seed, numbers),
                on_error="record",
                progress=False,
                **_by_number(call.options, numbers),
            )
        results: dict[int, list[Any]] = {number: [] for number in numbers}
        for generation in generations:
            results[numbers[generation.index]].append(generation)
        return results


def _by_number(options: dict[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """The options, with functions that are given a row's number where they would be given its place in the block."""
    changed = {}
    for name in _BY_PLACE:
        function = factory_of(options.get(name))
        if function is not None:
            changed[name] = _of_numbers(function, numbers)
    return options | changed


def _of_numbers(function: Callable[..., Any], numbers: Sequence[int]) -> Callable[..., Any]:
    def called(place: int, *rest: Any) -> Any:
        return function(numbers[place], *rest)

    return functools.update_wrapper(called, function)
