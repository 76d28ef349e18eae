"""``hf-batchllm run``: checks all that needs no model, then runs, then picks the exit code."""

from __future__ import annotations

import argparse
import errno
import os
import time
from collections.abc import Sequence
from typing import Any

from ..errors import BatchLLMError, OutputFileError, OutputWriteError
from ..files.output import kept_in
from ..files.run_options import RunOptions
from ..files.run_record import run_identity
from ..files.shards import read_shard
from ..files.sources import open_source
from ..files.streams import is_stream
from ..files.tables import format_of
from ..installed_versions import missing_package
from .arguments import config_from, option, run_parser
from .console import DONE, PROGRAM, SOME_ERRORS, STOPPED, USAGE, Console, UsageError, interruptible, reason
from .loading import Loader, adapters_from, base_of, check_folders
from .values import first_records, images_from, layout_from, reader_from, settings_from

_WITHOUT_ADAPTER = (
    "the first lines choose no `adapter`, and so run without those of --adapter: --set adapter={first} chooses one for "
    "all lines that choose none"
)


def main(arguments: Sequence[str]) -> int:
    asked = run_parser().read(arguments)
    if problem := missing_package():
        raise UsageError(problem)
    console = Console(asked.quiet, asked.traceback)
    with interruptible() as interrupts, console.warnings_shown():
        loader: Loader | None = None
        place, kind = asked.target, asked.output_format
        try:
            config, adapters = config_from(asked), adapters_from(asked)
            base, layout, images = settings_from(asked), layout_from(asked), images_from(asked)
            options = _run_options(asked, base.seed)
            _check_target(asked)
            if asked.tp and not asked.gpus:
                raise UsageError("--tp says how many of the GPUs of --gpus have a model together: pass --gpus, too")
            source = open_source(asked.source, asked.format, note=console.note)
            try:
                reader = reader_from(asked, source, layout, base, images)
                first = first_records(reader, source, asked.limit)
                if adapters and base.adapter is None and not first.name_adapters:
                    console.warning(_WITHOUT_ADAPTER.format(first=next(iter(adapters))))
                identity = run_identity(
                    _model_identity(asked, adapters),
                    layout,
                    base,
                    reader.dialect,
                    asked.token_ids,
                    **({} if images is None else images.identity),
                )
                place, kind = options.place(asked.target, source), options.format
                with options.open_output(place, source, console.note) as output:
                    loader = Loader(asked, config, base, first, adapters)
                    part = options.part(source, reader.prompt_text)
                    count = min(source.count, asked.limit or source.count) if part is None else len(part.numbers)
                    if len(output) < count:  # there is something to run
                        check_folders(asked)
                    importing = time.perf_counter()
                    from ..files.record_loop import run_records  # takes seconds: all else has been checked

                    importing = time.perf_counter() - importing
                    report = run_records(
                        loader,
                        source,
                        place,
                        output=output,
                        reader=reader,
                        options=options,
                        identity=identity,
                        model_name=asked.model,
                        note=console.note,
                        part=part,
                        loading_seconds=importing,
                    )
            finally:
                source.close()
        except KeyboardInterrupt:
            continues = loader is not None and loader.called
            console.error(f"interrupted.{_kept(place, kind) if continues else _untouched(place, kind)}")
            return interrupts.code
        except Exception as error:
            begun = loader is not None and loader.loaded
            stopped = begun and not isinstance(error, BatchLLMError | OSError)
            console.error(_why(error, begun) + (f".{_kept(place, kind)}" if stopped else ""), error)
            return STOPPED if begun or _closed_pipe(error) else USAGE
    if str(report):
        console.plain(str(report))
    if options.shard is not None:
        console.note(f"`{PROGRAM} merge {asked.target}` joins the parts once all {options.shard.of:,} are complete")
    return SOME_ERRORS if report.errors else DONE


def _run_options(asked: argparse.Namespace, seed: int | None) -> RunOptions:
    return RunOptions(
        output_format=asked.output_format,
        token_ids=asked.token_ids,
        order=asked.order,
        fsync=asked.fsync,
        window_bytes=asked.window,
        retry_errors=asked.retry_errors,
        restart=asked.restart,
        on_error=asked.on_error,
        limit=asked.limit,
        seed=seed,
        progress=False if asked.quiet else None,
        shard=None if asked.shard is None else read_shard(asked.shard),
    )


def _model_identity(asked: argparse.Namespace, adapters: dict[str, str]) -> dict[str, Any]:
    beside: dict[str, Any] = {}
    if (base := base_of(asked.model)) is not None:
        beside["base"] = _full_name(base)
    if adapters:
        beside["adapters"] = {name: _full_name(path) for name, path in sorted(adapters.items())}
    return {
        "model": _full_name(asked.model),
        "revision": asked.revision,
        "tokenizer": None if asked.tokenizer is None else _full_name(asked.tokenizer),
        "dtype": asked.dtype,
        **beside,
    }


def _full_name(name: str) -> str:
    """A folder's full path: a folder of the same name elsewhere is another model."""
    return os.path.realpath(name) if os.path.isdir(name) else name


def _check_target(asked: argparse.Namespace) -> None:
    if is_stream(asked.target):
        for name in ("restart", "retry_errors", "shard"):
            if getattr(asked, name):
                raise UsageError(
                    f"{option(name)} needs an output that can be continued, and {asked.target} is a stream"
                )
    else:
        format_of(asked.target, asked.output_format, OutputFileError)


def _why(error: Exception, begun: bool) -> str:
    if isinstance(error, BatchLLMError | OSError):
        return reason(error)
    return f"{'the run was stopped by' if begun else 'failed with'} {reason(error)} (--traceback shows where)"


def _kept(place: str, kind: str | None) -> str:
    kept = kept_in(place, kind)
    return f" The finished results are {kept}: the same command continues from them" if kept else ""


def _untouched(place: str, kind: str | None) -> str:
    """Before the output was begun: it may be another run's."""
    kept = kept_in(place, kind)
    return f" Nothing was changed: earlier results are {kept}" if kept else ""


def _closed_pipe(error: Exception) -> bool:
    return isinstance(error, BrokenPipeError | OutputWriteError) and getattr(error, "errno", None) == errno.EPIPE
