"""``run_file``: from a file of prompts to a file of results, with a generator of any kind that is there already."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from transformers import GenerationConfig

from ..errors import FilesError
from ..generator import BatchGenerator
from ..inputs.named_options import shows_options
from ..inputs.short_tracebacks import with_short_tracebacks
from ..notices import warn_user
from ..pool.generator_pool import GeneratorPool
from ..pool.rank_generator import RankGenerator
from ..wording import a_kind
from .merge_shards import merge_shards
from .paths import real_path
from .record_engine import RecordEngine, known_config, settings_in_config
from .records import RecordLayout
from .report import FileReport
from .run import images_of_lines, run_records
from .run_options import RunOptions
from .run_record import record_path
from .settings import read_settings
from .shards import Shard, read_shard, shards_beside
from .templates import Template

_SUMMED = (
    *("records", "before", "written", "errors", "beyond_context"),
    *("prompt_tokens", "computed_tokens", "new_tokens"),
)


@shows_options
@with_short_tracebacks
def run_file(
    gen: BatchGenerator | GeneratorPool | RankGenerator,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    generation_config: GenerationConfig | None = None,
    *,
    format: str | None = None,
    output_format: str | None = None,
    prompt_field: str | None = None,
    template: str | None = None,
    chat: bool = False,
    system: str | None = None,
    keep: str | Iterable[str] = (),
    line_settings: bool = True,
    image_folder: str | os.PathLike[str] | None = None,
    image_urls: bool = False,
    token_ids: bool = False,
    window_bytes: int = 256 << 20,
    retry_errors: bool = False,
    restart: bool = False,
    on_error: str = "record",
    limit: int | None = None,
    shard: str | None = None,
    seed: int | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> FileReport:
    """Generate for every record of a file. If a run is stopped anywhere, the same call continues it.

    source: JSON lines (``{"prompt": ...}``, ``{"messages": [...]}`` or requests of an OpenAI batch), CSV or Parquet;
        "-" is stdin. A record may bring settings of its own: {"prompt": "...", "max_new_tokens": 5, "seed": 7}.
    target: JSON lines, one for each record, written as they finish; or a .csv or .parquet, written at the end. The
        run record ``<target>.run.json`` beside it says how the results were made.
    format, output_format: "jsonl", "csv", "tsv" or "parquet", if the suffix does not say it.
    prompt_field: the field that is the prompt; by default "prompt" or "messages".
    template: builds the prompt from fields, as in "{context}\\n\\nQ: {question}\\nA:".
    chat, system: prompts that are text become a user's message, after this system message if there is one.
    keep: fields of a record that are copied into its result; "all" for all of them.
    line_settings: turn off to treat fields named as settings as data.
    image_folder: where images are read from whose path is in a line; paths are relative to it. A path that leads out of
        it is an error of its line. By default a line has no file read.
    image_urls: whether images are fetched whose http or https URL is in a line.
    token_ids: whether results have the new tokens' ids.
    window_bytes: how many bytes of records are in memory together. Prompts that begin alike share a window, but at its
        edges.
    retry_errors: run records whose result is an error again.
    restart: begin afresh; the old results are moved to ``<target>.bak-1``.
    on_error: "record", or "raise" to refuse the file if a record cannot be run.
    limit: run only the first records, this many.
    shard: "2/8" runs the second of eight parts, into ``<target>.shard-2-of-8.jsonl``. Each part may run on another
        machine, and ``merge_shards`` joins their results.
    seed: seed of sampling; by default a random one, kept in the run record (with ``shard``: one made of the input).
    generation_config, settings: as for ``model.generate``, for records without settings of their own. A temperature
        above 0 means sampling. Options of prompts (``tools``, ``chat_template_kwargs``, ``max_prompt_tokens``, ...) are
        settings, too.
    """
    if not isinstance(gen, BatchGenerator | GeneratorPool | RankGenerator):
        raise FilesError(f"run_file takes a generator first, run_file(BatchGenerator(model), ...), not {a_kind(gen)}")
    if isinstance(gen, BatchGenerator) and gen.architecture.parts > 1:
        raise FilesError(
            f"{gen.architecture.name} is spread over {gen.architecture.parts} processes, which would all write "
            f"{os.fspath(target)}: that is not supported. Pass a GeneratorPool, which has such processes of its own: "
            f"GeneratorPool(name, gpus={gen.architecture.parts}, tp={gen.architecture.parts})"
        )
    if not isinstance(generation_config, GenerationConfig | None):
        raise FilesError(
            f"`generation_config` must be a GenerationConfig, not {a_kind(generation_config)}: pass options by "
            "name, as in run_file(gen, source, target, max_new_tokens=100)"
        )
    base = read_settings({**settings, "seed": seed})
    if generation_config is not None:
        first = gen._generator if isinstance(gen, RankGenerator) else gen
        base = base.over(settings_in_config(RecordEngine(first).ask(known_config, generation_config)))
    options = RunOptions(
        output_format=output_format,
        token_ids=token_ids,
        window_bytes=window_bytes,
        retry_errors=retry_errors,
        restart=restart,
        on_error=on_error,
        limit=limit,
        seed=base.seed,
        progress=progress,
        shard=None if shard is None else read_shard(shard),
    )
    layout = RecordLayout(
        prompt_field=prompt_field,
        template=None if template is None else Template(template),
        chat=chat,
        system=system,
        line_settings=line_settings,
        keep=(keep,) if isinstance(keep, str) else tuple(keep),
    )
    images = images_of_lines(image_folder, image_urls, isinstance(gen, BatchGenerator))

    def run(own: BatchGenerator | GeneratorPool, options: RunOptions) -> FileReport:
        engine = RecordEngine(own)
        return run_records(
            engine,
            source,
            target,
            layout=layout,
            base=base,
            options=options,
            images=images,
            note=warn_user,
            format=format,
        )

    if isinstance(gen, RankGenerator):
        if shard is not None:
            raise FilesError("each rank runs a part of the file by itself: leave out `shard`")

        def run_part(own: BatchGenerator, part: Shard | None) -> FileReport:
            shown = progress if not gen.rank else False
            return run(own, replace(options, shard=part, progress=shown))

        return _run_on_ranks(gen, run_part, os.fspath(target), output_format, restart)
    return run(gen, options)


# -- the ranks of torchrun ---------------------------------------------------------------------------------------------


def _run_on_ranks(
    gen: RankGenerator,
    run: Callable[[BatchGenerator, Shard | None], FileReport],  # a part, or all of the file
    target: str,
    output_format: str | None,
    restart: bool,
) -> FileReport:
    """Each rank writes a part of the file, and the first rank merges the parts.

    A rank that is killed loses only what it had not written, and the same call continues. An error of one rank is
    raised on the others once they have written their parts. Where the output is there already, the first rank continues
    it alone: it is complete, or nearly so.
    """
    with gen._together() as exchange:
        there = os.path.exists(record_path(real_path(target))) and not restart and not shards_beside(target)
        if exchange("alone", there)[0] or len(gen) == 1:
            report: FileReport = exchange("run", None if gen.rank else run(gen._generator, None))[0]
            return report
        reports = exchange("run", run(gen._generator, Shard(gen.rank + 1, len(gen))))
        if not gen.rank:
            merge_shards(target, output_format=output_format, restart=restart)
            for shard in shards_beside(target):  # the output has all of it
                for path in (shard.place(target), record_path(shard.place(target))):
                    with contextlib.suppress(OSError):
                        os.unlink(path)
        exchange("merged", True)
        whole = FileReport(target, **{name: sum(getattr(each, name) for each in reports) for name in _SUMMED})
        whole.seconds = max(each.seconds for each in reports)
        whole.errors_in = reports[0].errors_in
        return whole
