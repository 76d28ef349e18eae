"""A file over the ranks of torchrun: each writes a part of it, and the first rank merges the parts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from ..errors import PoolError
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
    """On every rank. A rank that is killed loses only what it had not written, and the same call continues.

    Where the output is there already, the first rank continues it alone: it is complete, or nearly so.
    """
    with gen._together() as exchange:
        there = os.path.exists(record_path(target)) and not restart and not shards_beside(target)
        alone = exchange("alone", there)[0] or len(gen) == 1

        def told(what: str, act: Callable[[], FileReport | None]) -> list[FileReport | None]:
            """What each rank comes to. An error of one is raised on all, once all have ended."""
            problem: Exception | None = None
            report, said = None, ""
            try:
                report = act()
            except Exception as error:
                problem, said = error, f"{type(error).__name__}: {' '.join(str(error).split())}"
            everybody = exchange(what, (report, said))
            if problem is not None:
                raise problem
            for rank, (_, why) in enumerate(everybody):
                if why:
                    raise PoolError(f"rank {rank} has failed, and what the others have written is kept. {why}")
            return [each for each, _ in everybody]

        if alone:
            (report, *_) = told("run", lambda: None if gen.rank else run(gen._generator, None))
            assert report is not None
            return report
        mine = Shard(gen.rank + 1, len(gen))
        reports = [each for each in told("run", lambda: run(gen._generator, mine)) if each is not None]
        told("merge", lambda: None if gen.rank else _merge(target, output_format, restart))
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
