"""One dataset of Ray Data on a cluster: ``generate_dataset`` plans it, and actors of Ray's run it block by block.

Whatever needs torch is imported late: a task that reads rows on some machine of the cluster would wait for it.
"""

from __future__ import annotations

import functools
import json
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .config import BatchConfig
from .errors import ConfigError, OptionValueError
from .files.records import BadPromptRecord, PromptRecord, RecordLayout, RecordReader
from .files.results import SampleFields, TokenTexts
from .files.tables import plain
from .files.templates import Template
from .inputs.prompt_options import FOR_CHATS
from .inputs.prompts import Prompt
from .inputs.seeds import SeedOfWhole, checked_seeds
from .inputs.short_tracebacks import with_short_tracebacks
from .planning.pieces import split_plan
from .planning.sharing import make_plan
from .wording import a_kind, is_whole, shown

if TYPE_CHECKING:
    import pyarrow
    import ray.data
    from transformers import GenerationConfig

    from .results.generations import Generation

Record = PromptRecord | BadPromptRecord
ROW = "hf_batchllm_row"  # the column with a row's number in the whole dataset
RESULTS = (  # a column of the dataset with such a name gets "input_" before it
    *("index", "text", "finish_reason", "prompt_tokens", "new_tokens", "score", "token_ids", "logprobs", "samples"),
    *("adapter", "error", "seed"),
)
_OF_EACH_ROW = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")  # functions that get its number
_NOT_HERE = {
    "prompt_logprobs": "has no place in a dataset: leave it out",
    "assistant_model": "is a model of this process, and workers have none: leave it out",
    "streamer": "follows one sequence, and a cluster runs many: use BatchGenerator",
    "on_error": 'is not an option here: it is "record", and the column `error` says why a row has no answer',
    "progress": "is not an option here: Ray Data shows its own bars",
    **dict.fromkeys(
        ("prompts", "inputs", "input_ids", "attention_mask"),
        "is not an option here: the prompts are those of the dataset",
    ),
    "gpus": "is not an option here: `concurrency` is how many workers there are, `num_gpus` how many GPUs each has",
}


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

    The dataset is read and planned at once. The model runs when the result is looked at. ``index`` is a row's number.

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
    config, model_options: a BatchConfig for each worker, and options of ``from_pretrained``, such as ``dtype``.
    ray_options: what else Ray is told of each worker, such as ``{"accelerator_type": "H100", "max_restarts": 4}``.
    generation_config, options: as for ``BatchGenerator.generate``, for all rows.
    """
    import torch

    from .pool.loaders import loader_for, sendable_tokenizer

    try:
        import ray.data
    except ImportError as missing:
        why = "generate_dataset() needs Ray Data: pip install 'hf-batchllm[ray]'"
        raise ModuleNotFoundError(why, name=missing.name) from missing
    # Whatever can be wrong is told before anything runs.
    if not isinstance(ds, ray.data.Dataset):
        raise ConfigError(f"`ds` is {a_kind(ds)}: it is a dataset of Ray Data, such as ray.data.read_parquet(...)")
    least, most = concurrency if isinstance(concurrency, tuple | list) else (concurrency, concurrency)
    if not (is_whole(least) and is_whole(most) and 1 <= least <= most):
        raise ConfigError(f"`concurrency` is {shown(concurrency)}: how many workers are there, or the fewest and most?")
    if blocks is not None and (not is_whole(blocks) or blocks < 1):
        raise ConfigError(f"`blocks` is {shown(blocks)}: it is a whole number of at least 1")
    actors = dict(
        num_gpus=num_gpus,
        # A block that waits at one actor could run on another that is free.
        compute=ray.data.ActorPoolStrategy(min_size=least, max_size=most, max_tasks_in_flight_per_actor=1),
        batch_size=None,
        batch_format="pyarrow",
        zero_copy_batch=True,
        udf_modifying_row_count=False,
        **dict.fromkeys(("concurrency", "fn_args", "fn_kwargs", "fn_constructor_kwargs", "ray_remote_args_fn")),
        # What kills each of its actors would go on for ever: a block is tried anew three times.
        **{"num_cpus": None, "memory": None, "max_restarts": -1, "max_task_retries": 3, **(ray_options or {})},
    )
    load, tokenizer = loader_for(model, model_options, "generate_dataset(ds, {})"), sendable_tokenizer(tokenizer)
    config = BatchConfig.of(config, {})
    asked = {"generation_config": generation_config, **checked_options(options, generation_config), "seed": seed}
    drawn = int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else checked_seeds(seed, 1)
    if not isinstance(drawn, int):
        raise OptionValueError("seed", "is a list: it is one for all rows of the dataset")
    made = None if template is None else Template(template)
    layout = RecordLayout(prompt_column, made, chat, system, line_settings=False)
    column = getattr(ray.data.DataContext.get_current().checkpoint_config, "id_column", None)
    with _in_order(ds.context):
        names = ds.columns() or []
        rows = RowReader(layout, prompt_columns(layout, names))
        if column is not None and (column not in names or column in RESULTS):
            why = "it has to be a column of the dataset with a name that results do not have (see ds.rename_columns)"
            raise OptionValueError("checkpoint_config", f"names the column {column!r}: {why}")
        tables = ds.materialize().to_arrow_refs()
    read = ray.remote(RowReader.beginnings)  # where the tables are
    found = ray.get([read.remote(rows, table) for table in tables])
    texts = [text for some in found for text in some]
    if not texts:
        return ds
    planned = plan_blocks(texts, min(len(texts), blocks or how_many_blocks(len(texts), most)), config, asked)
    blocks_ds = dataset_of_blocks(tables, list(map(len, found)), planned, readers=most)
    # The public map_batches wants a batch size with GPUs, which cuts blocks or joins them. map_groups calls this.
    whole = getattr(blocks_ds, "map_batches_internal", None) or blocks_ds._map_batches_without_batch_size_validation
    loading = load, tokenizer, "cuda" if num_gpus else "cpu"
    return whole(Worker, fn_constructor_args=(rows, loading, config, asked, drawn, token_ids), **actors)


def checked_options(given: Mapping[str, Any], generation_config: Any) -> dict[str, Any]:
    """The options by their names in ``generate``. The model's own checks follow in each worker, before any block."""
    from transformers import GenerationMixin

    from .inputs.call_arguments import CALL_ARGUMENTS, CallArguments
    from .inputs.grammar_options import take_grammars
    from .inputs.option_checks import check_call_arguments, check_generation_config, check_values
    from .inputs.option_table import TABLE
    from .inputs.option_values import is_for_each
    from .inputs.other_names import by_our_names
    from .inputs.prompt_options import take_prompt_options
    from .inputs.unknown_options import unknown_option

    class AnyModel(GenerationMixin):  # for the names that every model knows
        def forward(self, input_ids: Any = None, attention_mask: Any = None) -> None: ...

    check_generation_config(generation_config)
    options = by_our_names(given, OptionValueError)
    for name, value in options.items():
        if value is not None and name in _NOT_HERE:
            raise OptionValueError(name, _NOT_HERE[name])
        if name in TABLE and TABLE[name].each and is_for_each(name, value):
            raise OptionValueError(name, "is a list: it is one value for all rows of the dataset")
        if value is not None and name not in TABLE:
            raise unknown_option(name, AnyModel())  # type: ignore[arg-type]
    fields = {name: value for name, value in options.items() if name != "adapter"}
    take_prompt_options(fields)
    take_grammars(fields)
    check_call_arguments(CallArguments(**{name: fields.pop(name, None) for name in CALL_ARGUMENTS}))
    check_values(fields)
    return options


def prompt_columns(layout: RecordLayout, names: Sequence[str]) -> list[str]:
    """The columns that prompts are made of; ConfigError if they are not among ``names``, those of the dataset."""
    those = f" (it has {', '.join(names)})" if names else ""
    wanted = [name for name in ("prompt", "messages") if name in names]
    if layout.template is not None:
        if layout.prompt_field is not None:
            raise ConfigError("`template` and `prompt_column` are two ways to say what the prompt is: keep one")
        wanted = [field if field in names else field.partition(".")[0] for field in layout.template.fields]
    elif layout.prompt_field is not None:
        wanted = [layout.prompt_field]
    elif len(wanted) != 1:
        have = "both `prompt` and `messages`" if wanted else f"no column `prompt` or `messages`{those}"
        raise ConfigError(f"the dataset has {have}: pass prompt_column=, or a template=")
    if missing := [name for name in wanted if name not in names]:
        raise ConfigError(f"the dataset has no column {shown(missing[0])}{those}")
    return list(dict.fromkeys(wanted))


@dataclass(frozen=True)
class RowReader:
    """Rows to prompts, by the rules of files. ``columns``: those that prompts are made of."""

    layout: RecordLayout
    columns: list[str]

    def read(self, table: pyarrow.Table, numbers: Sequence[int]) -> list[Record]:
        """``numbers``: of the rows of ``table``, in the whole dataset."""
        reader = RecordReader(self.layout, where="row {}".format)
        rows = table.select(self.columns).to_pylist(maps_as_pydicts="strict")
        written = (json.dumps({name: plain(value) for name, value in row.items()}) for row in rows)
        return [reader.read(number, raw.encode()) for number, raw in zip(numbers, written, strict=True)]

    def beginnings(self, table: pyarrow.Table) -> list[bytes]:
        """What two prompts must have in common at their beginnings to share anything."""
        records = self.read(table, range(table.num_rows))
        prompts = (record.prompt if isinstance(record, PromptRecord) else "" for record in records)
        texts = (each if isinstance(each, str) else json.dumps(each) for each in prompts)
        return [text.encode("utf-8", "surrogatepass") for text in texts]


def how_many_blocks(rows: int, workers: int) -> int:
    """Each worker gets one at least, and up to 16 where each fills a GPU; the most rows are lost with an actor."""
    fewest_rows, most_rows = 1024, 16_384
    return max(1, min(rows, max(workers, min(16 * workers, rows // fewest_rows), -(-rows // most_rows))))


def plan_blocks(texts: Sequence[bytes], blocks: int, config: BatchConfig, asked: Mapping[str, Any]) -> list[np.ndarray]:
    """The rows of each block, in their order; the block that is expected to take longest comes first.

    Four bytes of a text stand for a token. A block is made of whole pieces of the plan: a group that shares a prefix is
    parted only if it alone is more than a block.
    """
    samples = max(setting("num_return_sequences", 1, asked), setting("num_beams", 1, asked))
    answers = [samples * setting("max_new_tokens", 20, asked)] * len(texts)
    padded = (text.ljust(max(4, len(text) + -len(text) % 4), b"\0") for text in texts)
    plan = make_plan([Prompt(np.frombuffer(text, np.int32)) for text in padded], config, answers)
    split = split_plan(plan, answers, blocks, samples=[samples] * len(texts))
    largest_first = sorted(range(blocks), key=lambda block: -split.costs[block])
    rows = ([row for piece in split.shares[block] for row in split.pieces[piece].prompts] for block in largest_first)
    return [np.sort(np.asarray(each, np.int64)) for each in rows if each]


def setting(name: str, default: int, asked: Mapping[str, Any], model: Any = None) -> int:
    """A number as ``generate`` has it: an argument goes before the call's config, which goes before the model's own."""
    configs = asked.get("generation_config"), getattr(model, "generation_config", None)
    values = (asked.get(name), *(getattr(config, name, None) for config in configs))
    return int(next((value for value in values if value is not None), default))


@contextmanager
def _in_order(context: Any) -> Iterator[None]:
    """Rows have the order of their sources, whoever reads them. A checkpoint is of the whole call, not of this."""
    options, before = context.execution_options, (context.execution_options.preserve_order, context.checkpoint_config)
    options.preserve_order, context.checkpoint_config = True, None
    try:
        yield
    finally:
        options.preserve_order, context.checkpoint_config = before


def dataset_of_blocks(tables: Sequence[Any], sizes: Sequence[int], blocks: Sequence[np.ndarray], readers: int) -> Any:
    """A dataset with a block for each of ``blocks``: the rows of these numbers, which ascend, and the numbers as ROW.

    It is read from a source, as Ray's checkpoints leave out what is done where a source is read. ``sizes``: how many
    rows each of the ``tables`` has.
    """
    import pyarrow as pa
    import ray.data
    from ray.data.block import BlockMetadata

    ends = np.cumsum(sizes)

    def gathered(parts: Sequence[tuple[Any, np.ndarray]], rows: np.ndarray) -> list[pyarrow.Table]:
        some = (ray.get(table).take(pa.array(mine)) for table, mine in parts)
        whole = pa.concat_tables(some, promote_options="permissive").combine_chunks()
        return [whole.append_column(ROW, pa.array(rows))]

    def read_task(rows: np.ndarray) -> Any:
        inside = np.searchsorted(ends, rows, side="right")  # the table of each row
        parts = [(tables[at], rows[inside == at] - (ends[at] - sizes[at])) for at in np.unique(inside)]
        metadata = BlockMetadata(num_rows=len(rows), size_bytes=None, input_files=None, exec_stats=None)
        return ray.data.ReadTask(functools.partial(gathered, parts, rows), metadata)

    class PlannedRows(ray.data.Datasource):
        def get_read_tasks(self, parallelism: int, *more: Any, **given: Any) -> list[Any]:
            return [read_task(rows) for rows in blocks]

        def estimate_inmemory_data_size(self) -> int | None:
            return None

    # Readers need no CPU of their own: on a cluster whose CPUs all belong to actors they would wait for ever.
    return ray.data.read_datasource(PlannedRows(), override_num_blocks=len(blocks), concurrency=readers, num_cpus=0)


class Worker:
    """An actor of Ray's: it loads the model once, and runs a block at a time."""

    def __init__(
        self,
        rows: RowReader,
        loading: tuple[Callable[[], Any], Any, str],  # a function, a tokenizer and a device
        config: BatchConfig,
        asked: dict[str, Any],  # the arguments of ``generate``, with the user's own seed
        seed: int,
        token_ids: bool,
    ) -> None:
        from .generator import BatchGenerator
        from .pool.loaders import load_in_worker

        self.generator = BatchGenerator(*load_in_worker(*loading), config)
        # A stream checks its options at once. This one never begins, and its prompt is no chat.
        given = {name: asked[name] for name in asked if name not in FOR_CHATS}
        self.generator.stream([[0]], on_error="record", **given)
        settings = functools.partial(setting, asked=asked, model=self.generator.model)
        self._rows, self._asked, self._seed, self._token_ids = rows, asked, seed, token_ids
        self._samples, self._sampled = settings("num_return_sequences", 1), bool(settings("do_sample", 0))
        self._schema = self._columns(has_scores=settings("num_beams", 1) > 1)

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        """The table, with a column for each field of the results."""
        records = self._rows.read(table, table[ROW].to_pylist())
        results = self._generated([record for record in records if isinstance(record, PromptRecord)])
        fields = SampleFields(TokenTexts(self.generator.tokenizer), self._token_ids)
        rows = [self._row(record, results.get(record.number, []), fields) for record in records]
        made = table.drop_columns([ROW])
        made = made.rename_columns([f"input_{name}" if name in RESULTS else name for name in made.column_names])
        for name, column in zip(self._schema.names, table.from_pylist(rows, self._schema).columns, strict=True):
            made = made.append_column(name, column)
        return made

    def _generated(self, records: Sequence[PromptRecord]) -> dict[int, list[Generation]]:
        from .inputs.processors_and_criteria import factory_of
        from .model.device_memory import is_device_error

        numbers, asked = [record.number for record in records], dict(self._asked)
        asked["seed"] = SeedOfWhole(self._seed, numbers) if self._sampled else None  # the noise of one whole call
        factories = [name for name in _OF_EACH_ROW if factory_of(asked.get(name)) is not None]
        asked |= {name: _by_number(asked[name], numbers) for name in factories}
        try:
            prompts = [record.prompt for record in records]
            result = self.generator.generate(prompts, on_error="record", progress=False, **asked)
            return dict(zip(numbers, result.by_prompt, strict=True))
        except Exception as error:
            if is_device_error(error):
                # No later block could use the device. Ray starts another actor, which runs this block again.
                traceback.print_exc()
                os._exit(70)
            raise

    def _row(self, record: Record, samples: Sequence[Generation], fields: SampleFields) -> dict[str, Any]:
        row: dict[str, Any] = {"index": record.number, "seed": self._seed}
        if isinstance(record, BadPromptRecord):
            return row | {"error": str(record)}
        if samples[0].error is not None:
            return row | {"error": f"row {record.number}: the prompt {samples[0].error}"}
        made = [fields.of(sample, self._asked.get("logprobs")) for sample in samples]
        for each in made:
            if each["text"] is not None:  # half a character, as a tokenizer may give, cannot be written as UTF-8
                each["text"] = each["text"].encode("utf-8", "replace").decode()
        row |= {"prompt_tokens": len(samples[0].prompt_token_ids), "adapter": samples[0].adapter}
        return row | (made[0] if self._samples == 1 else {"samples": made})

    def _columns(self, has_scores: bool) -> pyarrow.Schema:
        """They depend on the options and the model alone: whoever reads many files takes the columns of the first."""
        import pyarrow as pa

        logprobs = self._asked.get("logprobs")
        token = {"token_id": pa.int64(), "token": pa.string(), "logprob": pa.float64()}
        top = {"top": pa.list_(pa.struct(token))} if logprobs else {}
        sample = {"text": pa.string(), "finish_reason": pa.string(), "new_tokens": pa.int64()}
        sample |= {"score": pa.float64()} if has_scores else {}
        sample |= {"token_ids": pa.list_(pa.int64())} if self._token_ids else {}
        sample |= {} if logprobs is None else {"logprobs": pa.list_(pa.struct(token | top))}
        found = {"index": pa.int64(), "prompt_tokens": pa.int64(), "error": pa.string()}
        found |= sample if self._samples == 1 else {"samples": pa.list_(pa.struct(sample))}
        found |= {"adapter": pa.string()} if "adapter" in self._asked else {}
        found |= {"seed": pa.uint64()} if self._sampled else {}
        return pa.schema([(name, found[name]) for name in RESULTS if name in found])


def _by_number(function: Callable[..., Any], numbers: Sequence[int]) -> Callable[..., Any]:
    """The function, given a row's number where it would be given its place in the block."""
    return functools.wraps(function)(lambda place, *rest: function(numbers[place], *rest))
