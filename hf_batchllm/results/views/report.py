"""A RunReport as HTML: headline figures, a picture of the timeline, and everything else in a table."""

from __future__ import annotations

from .markup import folded, percent, seconds, several, table, text, tiles, view
from .plan import plan_body
from .protocols import ShownReport
from .timeline import phases_bar, timeline_panels

_DRAWN = ("time",)  # lines of the text that a picture shows better

BY_INDEX = ". Rows are not aligned with the list that was passed: use .index"


def report_html(report: ShownReport) -> str:
    parts = ['<div class="hfb-title">How the run went</div>', interrupted(report), tiles(figures(report))]
    if report.timeline is not None:
        parts += [timeline_panels(report.timeline, report.kv_memory), phases_bar(report.timeline)]
    parts.append(_facts(report))
    parts.append(_shared(report))
    return view("".join(parts), str(report))


def figures(report: ShownReport) -> list[tuple[str, str]]:
    finished = f"{report.finished:,}"
    if report.finished < report.sequences:
        finished += f" of {report.sequences:,}"
    thing = "score" if report.scored_tokens else "sequence"
    tokens, kind = (report.scored_tokens, "scored") if report.scored_tokens else (report.new_tokens, "new")
    return [
        (finished, thing if report.sequences == 1 else f"{thing}s"),
        (f"{tokens:,}", f"{kind} tokens"),
        (seconds(report.seconds), "in all"),
        (f"{report.tokens_per_second:,.0f}", f"{kind} tokens / s"),
        (percent(report.saving), f"of prompt tokens {saved(report)}"),
    ]


def saved(report: ShownReport) -> str:
    """An interrupted call has not come to all that is saved."""
    return "saved" if report.finished == report.sequences else "saved by the plan"


def interrupted(report: ShownReport, and_so: str = "") -> str:
    """A warning, with ``and_so`` at its end; empty for a run that went to its end."""
    if report.finished >= report.sequences:
        return ""
    warning = f"Interrupted: {report.finished:,} of {several(report.sequences, 'sequence')} had finished{and_so}"
    return f'<div class="hfb-title hfb-warn">{text(warning)}</div>'


def _shared(report: ShownReport) -> str:
    plan = report.plan
    if not report.scored_tokens:
        return folded(f"What the prompts share: {percent(plan.saving)} of their tokens", plan_body(plan, "sequence"))
    # Scores are read from few sequences, which spares more than these share among them: its share is not the saving.
    run = several(len(plan.order), "sequence")
    if not plan.segments:
        return f'<div class="hfb-caption">{text(f"The scores were read from {run}, which share nothing more.")}</div>'
    return folded(f"The scores were read from {run}: what these share besides", plan_body(plan, "sequence"))


def _facts(report: ShownReport) -> str:
    """The lines of the report's text below the first."""
    rows = []
    for line in str(report).splitlines()[1:]:
        name, _, fact = line.partition("  ")
        if name not in _DRAWN:
            rows.append([f'<span class="hfb-fact">{text(name)}</span>', text(fact.strip())])
    return table([], rows, 0, narrow=True)
