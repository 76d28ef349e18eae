"""``hf-batchllm run``: everything that can be checked without the model, then the run, then the exit code."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Sequence
from typing import Any

from ..errors import BatchLLMError, OutputFileError, OutputWriteError
from ..files.records.identity import identity_of
from ..files.store.sources import format_of, open_source
from ..files.store.streams import is_stream
from .arguments import run_parser
from .config_flags import config_of
from .exits import DONE, SOME_ERRORS, STOPPED, USAGE, interruptible
from .loading import Loader
from .messages import Said, UsageError, reason
from .reading import first_of, form_of, reader_of, settings_of, size_of


def main(arguments: Sequence[str]) -> int:
    asked = run_parser().parse_args(arguments)
    said = Said(asked.quiet, asked.traceback)
    with interruptible() as interrupts, said.warnings_shown():
        loader: Loader | None = None
        try:
            config = config_of(asked)
            base, form = settings_of(asked), form_of(asked)
            window = size_of(asked.window, "--window")
            _check_target(asked)
            source = open_source(asked.source, asked.format, note=said.note)
            try:
                reader = reader_of(asked, source, form, base)
                first = first_of(reader, source, asked.limit)
                loader = Loader(asked, config, base, first)
                from ..files.running import run_records  # takes seconds: all else has been checked

                summary = run_records(
                    loader,
                    source,
                    asked.target,
                    reader=reader,
                    seed=base.seed,
                    identity=identity_of(_model_of(asked), form, base, reader.dialect, asked.token_ids),
                    model_name=asked.model,
                    output_format=asked.output_format,
                    token_ids=asked.token_ids,
                    order=asked.order,
                    fsync=asked.fsync,
                    window_bytes=window,
                    retry_errors=asked.retry_errors,
                    restart=asked.restart,
                    on_error=asked.on_error,
                    limit=asked.limit,
                    progress=False if asked.quiet else None,
                    note=said.note,
                )
            finally:
                source.close()
        except KeyboardInterrupt:
            begun = loader is not None and loader.loaded
            kept = f" What had finished is in {asked.target}: the same command goes on with it" if begun else ""
            said.error(f"interrupted.{kept}")
            return interrupts.code
        except Exception as error:
            begun = loader is not None and loader.loaded
            said.error(_why(error, begun), error)
            return STOPPED if begun or _closed_pipe(error) else USAGE
        finally:
            if loader is not None:
                loader.close()
    if str(summary):
        said.plain(str(summary))
    return SOME_ERRORS if summary.errors else DONE


def _model_of(asked: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": _named(asked.model),
        "revision": asked.revision,
        "tokenizer": None if asked.tokenizer is None else _named(asked.tokenizer),
        "dtype": asked.dtype,
    }


def _named(name: str) -> str:
    """A folder by its whole path: another folder of the same name is another model."""
    return os.path.realpath(name) if os.path.isdir(name) else name


def _check_target(asked: argparse.Namespace) -> None:
    if asked.target == "-":
        given = {"--restart": asked.restart, "--retry-errors": asked.retry_errors}
        for name, value in given.items():
            if value:
                raise UsageError(f"{name} needs an output that can be gone on with, and - is stdout")
    if not is_stream(asked.target):
        try:
            format_of(asked.target, asked.output_format, OutputFileError)
        except OutputFileError as error:
            raise UsageError(str(error).replace("--format", "--output-format")) from error


def _why(error: Exception, begun: bool) -> str:
    if isinstance(error, BatchLLMError | OSError):
        return reason(error)
    return f"{'the run stopped by' if begun else 'it failed by'} {reason(error)} (--traceback shows where)"


def _closed_pipe(error: Exception) -> bool:
    return isinstance(error, BrokenPipeError | OutputWriteError) and getattr(error, "errno", None) == errno.EPIPE
