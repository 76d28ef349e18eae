"""A file over the ranks of torchrun: each writes a part of it, and the first rank merges the parts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from ..generator import BatchGenerator
from ..pool.rank_generator import RankGenerator
from .file_report import FileReport
from .merge_shards import merge_shards
from .store.run_record import record_path
from .store.shards import Shard, shards_beside

_SUMMED = (
    *("records", "before", "written", "errors", "beyond_context"),
    *("prompt_tokens", "computed_tokens", "new_tokens"),
)


def run_on_ranks(
    gen: RankGenerator,
    run: Callable[[BatchGenerator, Shard | None], FileReport],  # a part, or all of the file
    target: str,
    output_format: str | None,
    restart: bool,
) -> FileReport:
    """On every rank. A rank that is killed loses only what it had not written, and the same call continues. An error of
    one rank is raised on the others once they have written their parts.

    Where the output is there already, the first rank continues it alone: it is complete, or nearly so.
    """
    with gen._together() as exchange:
        there = os.path.exists(record_path(target)) and not restart and not shards_beside(target)
        if exchange("alone", there)[0] or len(gen) == 1:
            report: FileReport = exchange("run", None if gen.rank else run(gen._generator, None))[0]
            return report
        reports = exchange("run", run(gen._generator, Shard(gen.rank + 1, len(gen))))
        if not gen.rank:
            _merge(target, output_format, restart)
        exchange("merged", True)
        return _of_all(target, reports)


def _merge(target: str, output_format: str | None, restart: bool) -> None:
    merge_shards(target, output_format=output_format, restart=restart)
    for shard in shards_beside(target):  # the output has all of it
        for path in (shard.place(target), record_path(shard.place(target))):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _of_all(target: str, reports: list[FileReport]) -> FileReport:
    whole = FileReport(target)
    for name in _SUMMED:
        setattr(whole, name, sum(getattr(each, name) for each in reports))
    whole.seconds = max(each.seconds for each in reports)
    whole.errors_in = reports[0].errors_in
    return whole
