"""``open_output``: a file that a later run can continue, or a stream."""

from __future__ import annotations

import os
from collections.abc import Callable

from ...errors import OutputFileError
from ...notices import warn_user
from .file_output import FileOutput, journal_path
from .formats import TABLES, format_of
from .output import Output, ResultLayout
from .paths import real_path
from .shards import Shard
from .sources import Source
from .stream_output import StreamOutput, is_stream
from .syncing import seconds_between_syncs
from .table_inputs import import_pyarrow


def kept_in(path: str, format: str | None = None) -> str:
    """Where a run that is not finished has its results, in words that follow "are"; "" where there are none."""
    if is_stream(path):
        return ""
    is_table = format_of(path, format, OutputFileError) in TABLES
    named = real_path(path) if os.path.islink(path) else path
    journal = journal_path(named, is_table)
    if not (os.path.isfile(journal) and os.path.getsize(journal)):
        return ""
    return f"in {journal} ({path} itself comes at the end)" if is_table else f"in {path}"


def open_output(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    layout: ResultLayout,
    source: Source | None = None,
    fsync: str | float = "5s",
    restart: bool = False,
    note: Callable[[str], None] | None = None,
    shard: Shard | None = None,
) -> Output:
    """Locks the output and reads what is in it. Nothing is changed before ``begin``.

    ``format``: jsonl, csv, tsv or parquet; by default the suffix says it. ``-`` is stdout; like everything that is no
    ordinary file, it takes JSON lines and cannot be continued. ``layout``: what lines of results mean. ``source`` must
    be another file. ``fsync``: always, never, or how often (``5s``). ``note`` is called with what a person should hear
    (by default: a warning). ``shard``: which part of the input is written there, if not all of it.
    """
    path = os.fspath(path)
    note = note or warn_user
    seconds_between_syncs(fsync)
    if is_stream(path):
        if format not in (None, "jsonl"):
            raise OutputFileError(f"{path} is a stream and takes JSON lines: a {format} file needs a name of its own")
        return StreamOutput(path, source)
    kind = format_of(path, format, OutputFileError)
    if kind == "parquet":
        import_pyarrow()
    return FileOutput(path, kind, source, fsync, restart, layout, note, shard)
