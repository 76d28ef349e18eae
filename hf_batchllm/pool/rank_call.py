"""One call of several ranks, each with a model of its own: what they agree on, a rank's part, and all results."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..engine.call import Call
from ..engine.progress import LONG
from ..errors import PoolError
from ..inputs.option_checks import check_progress
from ..inputs.plain_values import plain, plain_options
from ..inputs.preparing import bars_shown, bars_wanted
from ..model.inspection.fingerprint import fingerprint
from ..planning.pieces import Split
from ..planning.requests_and_prefixes import Request
from ..results.run_report import RunReport
from ..wording import differing
from .part_generator import PartGenerator
from .pool_report import count_in, report_of
from .ranks import Ranks
from .share import Share
from .work import ScoreWork, Work, key_of

_THE_SAME = "each rank has to pass the same prompts and options, and processors with the same attributes"


@dataclass(frozen=True)
class _Asked:
    """What a rank says of a call before it runs."""

    digest: str
    model: dict[str, str]  # its fingerprint
    seed: Any  # that it was given, or has drawn
    split: Split | None  # of the first rank: another kind of CPU might come to another one


@dataclass(frozen=True)
class _Ended:
    """What a rank says once its results are in the store."""

    share: Share
    counts: Counter[str]  # of its results
    problems: dict[Any, str]  # of units that cannot run, here or anywhere


class RankCalls:
    """The calls of one rank's generator. ``everywhere``: each rank gets all results, else the first one."""

    def __init__(self, generator: PartGenerator, ranks: Ranks, everywhere: bool) -> None:
        self._generator = generator
        self._ranks = ranks
        self._everywhere = everywhere
        self._fingerprint: dict[str, str] = {}
        self._written: list[tuple[int, int]] | None = None  # the weights that it was taken of

    def agreed(self, make: Callable[[], Work], progress: bool | None) -> tuple[Work, Split]:
        """The work that all ranks are asked for, with the first one's seed and split."""
        ranks = self._ranks
        check_progress(progress)
        with bars_wanted(False if ranks.rank else progress):
            work = make()
            work.plan.add_labels(work.sequences, self._generator._tokenizer.decode)
            digest, model = _digest(work, self._everywhere), self._fingerprint_now()
            split = None if ranks.rank else work.split(ranks.count, self._generator.token_costs())
        everybody = ranks.exchange("asked", _Asked(digest, model, work.job.seed, split), arriving=True)
        first = everybody[0]
        for rank, theirs in enumerate(everybody):
            if theirs.digest != first.digest:
                raise PoolError(f"rank {rank} was asked for something else than rank 0: {_THE_SAME}")
            if other := differing(first.model, theirs.model):
                raise PoolError(f"rank {rank} has {other} than rank 0: each rank has to hold the same model")
        work.job = replace(work.job, seed=first.seed)
        return work, first.split

    def run(self, work: Work, split: Split, strict: bool, progress: bool | None, began: float) -> None:
        """This rank's part, then everybody's results and the report. ``began``: by time.perf_counter()."""
        finished, ranks = work.finished, self._ranks
        planning, clock = time.perf_counter() - began, time.perf_counter()
        share = Share(f"rank {ranks.rank}", ran=set(split.shares[ranks.rank]), began=clock)
        counts, results = Counter[str](), list[Any]()

        def deliver(some: list[Any]) -> None:
            results.extend(some)
            for result in some:
                count_in(counts, result)
                finished.results[key_of(result)] = work.whole(result)

        units = sorted(unit for number in share.ran for unit in split.pieces[number].prompts)
        shown = not ranks.rank and bars_shown(progress, finished.expected >= LONG)  # though its part is short
        report = self._run_part(work, units, strict, shown, deliver) if units else None
        took = time.perf_counter() - clock
        ranks.say("results", results)
        share.read = 0 if report is None else report.computed_tokens + report.recomputed_tokens
        share.written = counts["new_tokens"]
        share.end_part(report, took)
        # Once a rank has said this, the others can do without it.
        said: list[_Ended] = ranks.exchange("ended", _Ended(share, counts, work.problems))
        reads = time.perf_counter()
        for rank, theirs in enumerate(said):
            work.problems.update(theirs.problems)
            if rank != ranks.rank and (self._everywhere or not ranks.rank):
                for result in ranks.heard("results", rank):
                    finished.results[key_of(result)] = work.whole(result)
        finished.results.update((key_of(failure), failure) for failure in work.failures())
        if ranks.rank and not self._everywhere:
            finished.results.clear()
        now = time.perf_counter()
        for theirs in said:
            theirs.share.seconds += now - reads
        finished.report = report_of(
            [theirs.share for theirs in said],
            work,
            sum((theirs.counts for theirs in said), Counter[str]()),
            over=True,
            seconds=now - clock,
            planning_seconds=planning,
        )

    def _run_part(
        self, work: Work, units: list[int], strict: bool, progress: bool, deliver: Callable[[list[Any]], None]
    ) -> RunReport | None:
        part = work.part(units)

        def begin(call: Call) -> Callable[[Request], list[Any]]:
            finish = part.begin(self._generator, call)
            work.problems.update(part.problems)
            if strict and part.problems:
                raise work.error()
            return finish

        self._ranks.moved()
        self._generator.run_part(begin, deliver, lambda step, new_tokens: self._ranks.moved(), progress=progress)
        return self._generator.last_report

    def _fingerprint_now(self) -> dict[str, str]:
        """Taken anew once a weight was written to: in a training, between two calls."""
        model = self._generator.model
        written = [(each.data_ptr(), each._version) for each in model.parameters()]
        if written != self._written:
            tokenizer = None if self._fingerprint else self._generator._tokenizer.found()
            self._fingerprint |= fingerprint(model, tokenizer)
            self._written = written
        return self._fingerprint


def _digest(work: Work, everywhere: bool) -> str:
    """Processors and criteria count by what they hold when they are first seen, other objects by their classes."""
    job = work.job
    said = [
        type(work).__name__,
        everywhere,
        job.places,
        job.max_new_tokens,
        job.can_stop,
        sorted(map(str, job.problems)),
        job.adapters,
        None if job.grammars is None else job.grammars.each,
        None if job.seed_is_drawn else job.seed,
        plain_options(job.options, held=""),
    ]
    digest = hashlib.blake2b(repr(plain(said)).encode("utf-8", "surrogatepass"), digest_size=12)
    if isinstance(work, ScoreWork):
        for item in work.scores.inputs.items:
            digest.update(repr((item.index, item.choice, item.first)).encode() + item.ids.tobytes())
    for prompt in job.prompts:
        digest.update(len(prompt).to_bytes(4, "little") + prompt.ids.tobytes())
    return digest.hexdigest()
