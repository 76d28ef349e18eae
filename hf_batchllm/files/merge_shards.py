"""``merge_shards``: the results of jobs that ran a part of a file each, to one output."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import FilesError, OutputFileError
from ..inputs.short_tracebacks import with_short_tracebacks
from ..notices import warn_user
from .merge_report import MergeReport
from .records.prompt_records import OPENAI
from .records.result_layout import RESULT_LAYOUT
from .store.file_output import FileOutput
from .store.formats import format_of
from .store.open_output import open_output
from .store.resume_checks import RESTART_HINT
from .store.shard_files import ShardFiles
from .store.stream_output import is_stream

_SUMMED = ("beyond_context", "prompt_tokens", "computed_tokens", "new_tokens", "seconds", "loading_seconds")


@with_short_tracebacks
def merge_shards(
    target: str | os.PathLike[str],
    *,
    output_format: str | None = None,
    partial: bool = False,
    restart: bool = False,
) -> MergeReport:
    """Join the results of all parts of a file into ``target``, as if one run had written it.

    target: the output that each job was given. The results of ``run_file(..., shard="2/8")`` are beside it, in
        ``<target>.shard-2-of-8.jsonl``. They are not changed, and not deleted.
    output_format: "jsonl", "csv", "tsv" or "parquet", if the suffix does not say it.
    partial: merge what is there, even if results are missing. Another merge adds more, and so does a run of the whole
        file with the same settings.
    restart: begin afresh; what is in ``target`` is moved to ``<target>.bak-1``.
    """
    return merge(os.fspath(target), output_format, partial=partial, restart=restart, note=warn_user)


def merge(
    target: str, output_format: str | None, *, partial: bool, restart: bool, note: Callable[[str], None]
) -> MergeReport:
    if is_stream(target):
        name = "stdout" if target == "-" else target
        raise OutputFileError(f"{name} is no file: give the output that the jobs were given, whose parts are beside it")
    format_of(target, output_format, OutputFileError)
    parts = ShardFiles(target, RESULT_LAYOUT, note)
    _refuse_missing(target, parts, partial)
    with open_output(target, output_format, layout=RESULT_LAYOUT, restart=restart, note=note) as output:
        assert isinstance(output, FileOutput)
        _refuse_old_errors(target, parts, output.errors)
        record = output.begin_merged(parts.record, parts.count)
        missing = output.missing()
        wanted = np.zeros(parts.count, dtype=bool)
        wanted[missing] = True
        report = MergeReport(target, parts.of, parts.count, before=parts.count - len(missing))
        report.errors_in = "response.body.error" if record.settings.get("dialect") == OPENAI else "error"
        known = output.errors
        report.errors = int((known < parts.count).sum()) + int((parts.is_error & wanted).sum())
        if output.complete:  # a table: its journal is gone
            report.errors = int(record.figures.get("errors") or 0)
            if not parts.missing and parts.is_error.sum() < report.errors:
                raise FilesError(_old_errors(target, report.errors - int(parts.is_error.sum())))
        if record.model:
            output.confirm_model(record.model)
        for lines in parts.pieces(wanted) if len(missing) else ():
            output.append(lines)
            report.written += len(lines)
        if report.left:
            report.lacks = parts.lacks
            output.finish_partly()
        else:
            output.finish(figures=_figures(parts, report))
        return report


def _refuse_missing(target: str, parts: ShardFiles, partial: bool) -> None:
    if not parts.missing:
        return
    if not parts.answered.any():
        raise FilesError(f"{target} cannot be merged, as no part has a result yet: {parts.lacks}")
    if not partial:
        raise FilesError(
            f"{target} cannot be merged yet, as {parts.missing:,} of {parts.count:,} results are missing: "
            f"{parts.lacks}. Run these jobs again, and each continues; or `--partial` merges what is there"
        )


def _refuse_old_errors(target: str, parts: ShardFiles, errors: np.ndarray) -> None:
    """Errors of an earlier merge whose records have run again since."""
    errors = errors[errors < parts.count]
    better = parts.answered[errors] & ~parts.is_error[errors]
    if better.any():
        raise FilesError(_old_errors(target, int(better.sum())))


def _old_errors(target: str, count: int) -> str:
    return (
        f"{target} was merged before, and {count:,} of its errors {'has' if count == 1 else 'have'} a result in the "
        f"parts now: {RESTART_HINT.format(path=target)}"
    )


def _figures(parts: ShardFiles, report: MergeReport) -> dict[str, Any]:
    """As a run has them. Tokens and seconds are summed over the jobs."""
    figures = [part.record.figures for part in parts.begun]
    return {
        "records": report.records,
        "before": 0,
        "written": report.records,
        "errors": report.errors,
        **{name: sum(each.get(name) or 0 for each in figures) for name in _SUMMED},
    }
