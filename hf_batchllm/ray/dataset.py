"""``generate_dataset``: a dataset of Ray Data -> a dataset with answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..config import BatchConfig
from ..errors import ConfigError, OptionValueError
from ..files.records.prompt_records import RecordLayout
from ..files.records.templates import Template
from ..inputs.named_options import shows_options
from ..inputs.seeds import checked_seeds
from ..inputs.short_tracebacks import with_short_tracebacks
from ..pool.loaders import loader_for, sendable_tokenizer
from ..wording import a_kind, is_number, is_whole, shown
from .call_options import checked_options, expected_answers, taken_columns
from .plan_rows import blocks_of_rows, how_many_blocks
from .planned_source import columns_of, dataset_of_blocks, run_blocks, tables_in_order
from .ray_package import ray_data
from .rows import RowReader, reader_of
from .worker import WorkerCall

if TYPE_CHECKING:
    import ray.data
    from transformers import GenerationConfig

_NOT_FOR_RAY = {
    **dict.fromkeys(("num_gpus", "concurrency"), "is an argument of generate_dataset itself"),
    **dict.fromkeys(("compute", "batch_size", "batch_format"), "follows from the plan: leave it out"),
}


@shows_options
@with_short_tracebacks
def generate_dataset(
    ds: ray.data.Dataset,
    model: str | os.PathLike[str] | Callable[[], Any],
    tokenizer: Any = None,
    generation_config: GenerationConfig | None = None,
    *,
    concurrency: int | tuple[int, int],
    num_gpus: float = 1,
    prompt_column: str | None = None,
    template: str | None = None,
    chat: bool = False,
    system: str | None = None,
    seed: int | None = None,
    token_ids: bool = False,
    blocks: int | None = None,
    config: BatchConfig | None = None,
    model_options: Mapping[str, Any] | None = None,
    ray_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ray.data.Dataset:
    """Generate for every row of a dataset of Ray Data: the dataset, with the answers in columns of their own.

        ds = ray.data.read_parquet("in/")
        out = generate_dataset(ds, "path/or/name", concurrency=8, max_new_tokens=100)
        out.write_parquet("out/")

    The dataset is read at once, and planned. The model runs when the result is written or looked at. Rows come block by
    block; ``index`` is a row's number.

    model: a path or name for ``from_pretrained``, or a function that loads the model and returns it (or the model and
        its tokenizer). Each worker loads its own.
    tokenizer: a tokenizer, or a path or name; by default the one saved beside the model.
    concurrency: how many workers there are, each with a whole model; or the fewest and the most.
    num_gpus: how many GPUs Ray gives each worker; 0 for the CPU.
    prompt_column: the column with the prompts: strings, token ids or chats; by default "prompt" or "messages".
    template: builds the prompt from columns, as in "{context}\\n\\nQ: {question}\\nA:".
    chat, system: prompts that are text become a user's message, after this system message if there is one.
    seed: of the sampling noise; by default one is drawn. The column ``seed`` has it.
    token_ids: whether results have the new tokens' ids.
    blocks: into how many blocks the dataset is parted. A block runs in one call of ``generate``.
    config: a BatchConfig, for each worker.
    model_options: of ``from_pretrained``, such as ``{"dtype": torch.bfloat16}``.
    ray_options: what else Ray is told of each worker, such as ``{"accelerator_type": "H100", "max_restarts": 4}``.
    generation_config, options: as for ``BatchGenerator.generate``, for all rows.
    """
    ray = ray_data()
    if not isinstance(ds, ray.data.Dataset):
        raise ConfigError(f"`ds` is {a_kind(ds)}: it is a dataset of Ray Data, such as ray.data.read_parquet(...)")
    # Whatever can be wrong is told before anything runs.
    load = loader_for(model, model_options, "generate_dataset(ds, {})")
    tokenizer = sendable_tokenizer(tokenizer)
    smallest, largest = _workers(concurrency)
    if not is_number(num_gpus) or num_gpus < 0:
        raise ConfigError(f"`num_gpus` is {shown(num_gpus)}: it is how many GPUs each worker gets, 0 for the CPU")
    if blocks is not None and (not is_whole(blocks) or blocks < 1):
        raise ConfigError(f"`blocks` is {shown(blocks)}: it is a whole number of at least 1")
    for name in ray_options or {}:
        if name in _NOT_FOR_RAY:
            raise ConfigError(f"`ray_options` has {name!r}, which {_NOT_FOR_RAY[name]}")
    config = BatchConfig.of(config, {})
    asked = checked_options(options, generation_config)
    drawn = _drawn_seed() if seed is None else seed
    if not isinstance(checked_seeds(drawn, 1), int):
        raise OptionValueError("seed", "is a list: it is one for all rows of the dataset")
    layout = RecordLayout(
        prompt_field=prompt_column,
        template=None if template is None else Template(template),
        chat=chat,
        system=system,
        line_settings=False,
    )
    names = columns_of(ds)
    reader = reader_of(layout, names)
    checkpoint = ray.data.DataContext.get_current().checkpoint_config
    taken_columns(names, None if checkpoint is None else checkpoint.id_column)

    tables = tables_in_order(ds)
    words, sizes = _words(tables, reader)
    if not words:
        return ds
    new_tokens, samples = expected_answers(asked, generation_config)
    planned = blocks_of_rows(
        words,
        new_tokens=new_tokens,
        samples=samples,
        blocks=min(len(words), blocks or how_many_blocks(len(words), largest)),
        config=config,
    )
    call = WorkerCall(
        load=load,
        tokenizer=tokenizer,
        config=config,
        device="cuda" if num_gpus else "cpu",
        reader=reader,
        generation_config=generation_config,
        options=asked,
        seed=drawn,
        token_ids=token_ids,
        seed_given=seed is not None,
    )
    return run_blocks(
        dataset_of_blocks(tables, sizes, planned, largest),
        call,
        smallest=smallest,
        largest=largest,
        num_gpus=num_gpus,
        ray_options=ray_options or {},
    )


def _workers(concurrency: Any) -> tuple[int, int]:
    given = concurrency if isinstance(concurrency, tuple | list) else (concurrency, concurrency)
    if len(given) != 2 or not all(is_whole(each) for each in given) or not 1 <= given[0] <= given[1]:
        raise ConfigError(
            f"`concurrency` is {shown(concurrency)}: it is how many workers there are, or the fewest and the most"
        )
    return int(given[0]), int(given[1])


def _drawn_seed() -> int:
    """From torch's random numbers, so that a call repeats after ``set_seed``."""
    return int(torch.randint(2**63 - 1, (), device="cpu").item())


def _words(tables: list[Any], reader: RowReader) -> tuple[list[Any], list[int]]:
    """What stands for the tokens of each row, read where the tables are; and how many rows each table has."""
    ray = ray_data()
    read = ray.remote(RowReader.words)
    words: list[Any] = []
    sizes = []
    for flat, ends in ray.get([read.remote(reader, table) for table in tables]):
        begins = [0, *ends[:-1].tolist()]
        words += [flat[begin:end] for begin, end in zip(begins, ends.tolist(), strict=True)]
        sizes.append(len(ends))
    return words, sizes
