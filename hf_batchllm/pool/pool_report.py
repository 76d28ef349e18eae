"""The report of a pool's call: one for the whole, and what each worker did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..inputs.seeds import without_numbers
from ..results.generations import Generation
from ..results.run_report import RunReport, WorkerReport
from ..results.scores import Score
from .share import Share
from .work import ScoreWork, Work

_ADDED = (
    *("computed_tokens", "recomputed_tokens", "cached_tokens", "model_tokens", "steps", "preemptions", "idle_tokens"),
    *("drafted_tokens", "accepted_tokens", "draft_seconds"),
    *("peak_memory", "kv_memory"),  # each worker has memory of its own
)
_SAID = ("fused", "graphs", "states")  # alike in all workers, or nearly


def count_in(counts: Counter[str], result: Generation | Score) -> None:
    """What results hold is counted as they come."""
    kind = "scored_tokens" if isinstance(result, Score) else "new_tokens"
    counts.update({"finished": 1, kind: len(result.token_ids)})


def report_of(
    shares: Sequence[Share],
    work: Work,
    counts: Counter[str],  # of all results
    *,
    over: bool,  # whether all of them are there
    seconds: float,  # that the call took, after it was planned
    planning_seconds: float,
) -> RunReport:
    plan = work.plan
    reports = [report for share in shares for report in share.reports]
    sums: dict[str, Any] = {name: sum(getattr(report, name) for report in reports) for name in _ADDED}
    untold = sum(share.read - share.told for share in shares)
    sums["computed_tokens"] += untold
    sums["model_tokens"] += untold
    said: dict[str, Any] = {
        name: next((text for report in reports if (text := getattr(report, name))), "") for name in _SAID
    }
    computed, total = sums["computed_tokens"], work.prompt_tokens
    return RunReport(
        sequences=work.finished.expected,
        finished=counts["finished"],
        prompt_tokens=total,
        saving=1 - computed / total if over and total else plan.saving,
        new_tokens=counts["new_tokens"],
        scored_tokens=counts["scored_tokens"],
        seconds=planning_seconds + seconds,
        planning_seconds=planning_seconds,
        seed=without_numbers(work.job.seed),
        plan=plan,
        device_memory=max((report.device_memory for report in reports), default=0),
        workers=tuple(_of_worker(share, seconds, isinstance(work, ScoreWork)) for share in shares),
        parted_tokens=max(0, computed - plan.computed_tokens) if over else 0,
        **sums,
        **said,
    )


def _of_worker(share: Share, seconds: float, scores: bool) -> WorkerReport:
    return WorkerReport(
        device=share.name,
        pieces=len(share.ran),
        read_tokens=share.read,
        new_tokens=0 if scores else share.written,
        busy=min(1.0, share.seconds / max(seconds, 1e-9)),
        lost=share.out,
        sending_seconds=max(0.0, share.seconds - share.running_seconds),
    )
