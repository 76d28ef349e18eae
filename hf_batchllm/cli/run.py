"""``hf-batchllm run``: options become values, ``files/run.py`` runs, and what comes of it an exit code."""

from __future__ import annotations

import argparse
import errno
from collections.abc import Sequence
from dataclasses import fields

from ..errors import BatchLLMError, OutputWriteError
from ..files.run import images_of_lines, run_records
from ..files.run_options import RunOptions
from ..files.shards import read_shard
from ..installed_versions import missing_package
from .arguments import run_parser
from .console import DONE, INTERRUPTED, PROGRAM, SOME_ERRORS, STOPPED, USAGE, Console, UsageError, interruptible, reason
from .loading import Loader
from .values import layout_from, settings_from


def main(arguments: Sequence[str]) -> int:
    asked = run_parser().parse_args(arguments)
    if problem := missing_package():
        raise UsageError(problem)
    console = Console(asked.quiet, asked.traceback)
    with interruptible(), console.warnings_shown():
        loaded = False
        try:
            base = settings_from(asked)
            loader = Loader(asked, base, console)
            options = _run_options(asked, base.seed)
            try:
                report = run_records(
                    loader,
                    asked.source,
                    asked.target,
                    layout=layout_from(asked),
                    base=base,
                    options=options,
                    images=images_of_lines(asked.image_folder, asked.image_urls, not asked.gpus),
                    note=console.note,
                    format=asked.format,
                )
            finally:
                loaded = loader.loaded
        except KeyboardInterrupt as interrupt:
            console.error(f"{str(interrupt) or 'interrupted'}.")
            return INTERRUPTED
        except Exception as error:
            console.error(_why(error, loaded), error)
            return STOPPED if loaded or _closed_pipe(error) else USAGE
    console.plain(str(report))
    if options.shard is not None:
        console.note(f"`{PROGRAM} merge {asked.target}` joins the parts once all {options.shard.of:,} are complete")
    return SOME_ERRORS if report.errors else DONE


def _run_options(asked: argparse.Namespace, seed: int | None) -> RunOptions:
    given = {each.name: getattr(asked, each.name) for each in fields(RunOptions) if hasattr(asked, each.name)}
    given |= {"window_bytes": asked.window, "seed": seed, "progress": False if asked.quiet else None}
    return RunOptions(**given | {"shard": None if asked.shard is None else read_shard(asked.shard)})


def _why(error: Exception, loaded: bool) -> str:
    why = reason(error)
    if not isinstance(error, BatchLLMError | OSError):
        why = f"{'the run was stopped by' if loaded else 'failed with'} {why} (--traceback shows where)"
    return ". ".join([why, *getattr(error, "__notes__", ())])


def _closed_pipe(error: Exception) -> bool:
    return isinstance(error, BrokenPipeError | OutputWriteError) and getattr(error, "errno", None) == errno.EPIPE
