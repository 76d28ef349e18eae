"""The options of a call: checked by the driver as far as no model is needed, and once more where there is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from transformers import GenerationMixin

from ..config import BatchConfig
from ..errors import OptionValueError
from ..inputs.adapters import AS_IT_IS, adapter_of_each
from ..inputs.base_model import GenerativeModel, base_model
from ..inputs.call_arguments import CALL_ARGUMENTS, CallArguments
from ..inputs.grammar_options import take_grammars
from ..inputs.option_checks import check_call_arguments, check_generation_config, check_values
from ..inputs.option_conflicts import check_beams
from ..inputs.option_table import TABLE
from ..inputs.option_warnings import warn_of_greedy
from ..inputs.options import Options
from ..inputs.other_names import by_our_names
from ..inputs.prompt_options import PROMPT_OPTIONS, take_prompt_options
from ..inputs.resolve_options import resolve_options
from ..inputs.unknown_options import unknown_option
from ..sampling.call_grammars import checked_grammars
from .result_columns import NAMES

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from ..generator import BatchGenerator

_DEFAULT_NEW_TOKENS = 20  # transformers'; the plan alone reckons with it
_FOR_EACH = ("adapter", *(name for name in PROMPT_OPTIONS if name != "tools"))
_NO_COLUMN = "has no place in a dataset: leave it out"
_NOT_HERE = {
    "prompt_logprobs": _NO_COLUMN,
    "assistant_model": "is a model of this process, and workers have none: leave it out",
    "streamer": "follows one sequence, and a cluster runs many: use BatchGenerator",
    "inputs": "is not an option here: the prompts are those of the dataset",
    "on_error": 'is not an option here: it is "record", and the column `error` says why a row has no answer',
    "progress": "is not an option here: Ray Data shows its own bars",
    "gpus": "is not an option here: `concurrency` is how many workers there are, `num_gpus` how many GPUs each has",
}


class _AnyModel(GenerationMixin):
    """For the names that every model knows."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None) -> None: ...


def checked_options(given: Mapping[str, Any], generation_config: Any) -> dict[str, Any]:
    """The options by their names in ``generate``. The model's own checks follow in each worker, before any block."""
    if isinstance(generation_config, list | tuple):
        raise OptionValueError("generation_config", "is a list: it is one GenerationConfig for all rows")
    check_generation_config(generation_config)
    config_fields = [field.name for field in dataclasses.fields(BatchConfig)]
    for name, value in given.items():
        if name in config_fields:
            raise OptionValueError(name, f"is a field of BatchConfig: pass config=BatchConfig({name}=...)")
        if name in _NOT_HERE and value is not None:
            raise OptionValueError(name, _NOT_HERE[name])
        if name in _FOR_EACH and isinstance(value, list | tuple):
            raise OptionValueError(name, "is a list: it is one value for all rows of the dataset")
    options = by_our_names(given, OptionValueError)
    for name, value in options.items():
        if name not in TABLE and value is not None:
            raise unknown_option(name, cast(GenerativeModel, _AnyModel()))
    fields = dict(options)
    fields.pop("adapter", None)
    take_prompt_options(fields)
    grammars = take_grammars(fields)
    for name in () if grammars is None else grammars.lists:
        raise OptionValueError(name, "is a list: it is one value for all rows of the dataset")
    check_call_arguments(CallArguments(**{name: fields.pop(name, None) for name in CALL_ARGUMENTS}))
    check_values(fields)
    return options


def resolved(
    gen: BatchGenerator, generation_config: GenerationConfig | None, options: Mapping[str, Any], seed: int | None
) -> Options:
    """What the model makes of the options. ``seed``: the user's, which a greedy call has no use for."""
    fields = dict(options)
    adapter_of_each(gen.model, fields.pop("adapter", AS_IT_IS), 1, gen._notices)
    take_prompt_options(fields)
    grammars = take_grammars(fields)
    found = resolve_options(gen.model, generation_config, fields, None, gen._notices)
    check_beams([found])
    if grammars is not None:
        checked_grammars(grammars, [found], gen._tokenizer.required, gen.architecture.vocab_size, gen._notices)
    if not found.do_sample and found.num_beams == 1:
        warn_of_greedy(fields, seed, [generation_config], base_model(gen.model).generation_config, gen._notices)
    return found


def expected_answers(options: Mapping[str, Any], generation_config: GenerationConfig | None) -> tuple[int, int]:
    """For the plan: how many tokens an answer has, and how many answers a prompt."""

    def value(name: str) -> Any:
        given = options.get(name)
        return getattr(generation_config, name, None) if given is None else given

    most = value("max_new_tokens") or _DEFAULT_NEW_TOKENS
    return int(most), max(int(value("num_return_sequences") or 1), int(value("num_beams") or 1))


def taken_columns(names: list[str], id_column: str | None) -> None:
    """Refuse a checkpoint by a column that would get another name."""
    if id_column is not None and id_column not in names:
        raise OptionValueError("checkpoint_config", f"names {id_column!r}, and the dataset has no such column")
    if id_column in NAMES:
        raise OptionValueError(
            "checkpoint_config",
            f"names {id_column!r}, which results have, too: the dataset's own column becomes 'input_{id_column}'. "
            "Give the column of ids another name first, by ds.rename_columns",
        )
