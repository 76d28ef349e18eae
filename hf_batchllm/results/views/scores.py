"""A ScoreResult as a table: one row for each continuation, the likeliest of each context marked."""

from __future__ import annotations

from .markup import one_line, percent, seconds, several, table, text, view
from .report import interrupted
from .subjects import ShownScore, ShownScores

_MOST = 40  # rows
_TEXT = 160  # characters
_IDS = 24


def scores_html(result: ShownScores) -> str:
    best = _likeliest(result)
    rows = [_row(score, (score.index, score.choice) in best) for score in result[:_MOST]]
    body = f'<div class="hfb-title">{text(several(len(result), "score"))}</div>'
    report = result.report
    if report is not None:
        body += interrupted(report)
    if rows:
        body += table(["#", "choice", "continuation", "tokens", "log-probability", "a token"], rows, 3)
    if len(result) > _MOST:
        body += f'<div class="hfb-caption">{text(f"… {len(result) - _MOST:,} more")}</div>'
    if report is not None:
        said = f"In {seconds(report.seconds)}, {percent(report.saving)} of tokens saved. More in .report"
        body += f'<div class="hfb-caption">{text(said)}</div>'
    return view(body, repr(result))


def _likeliest(result: ShownScores) -> set[tuple[int, int | None]]:
    """Where there is something to choose from."""
    if not result.complete:
        return set()
    pairs = zip(result.by_context, result.best(), strict=True)
    return {(scores[0].index, choice) for scores, choice in pairs if len(scores) > 1}


def _row(score: ShownScore, is_best: bool) -> list[str]:
    if score.error is not None:
        said = f'<span class="hfb-bad">{one_line(score.error, _TEXT)}</span>'
        return [text(score.index), text(score.choice), said, "", "", ""]
    what = " ".join(map(str, score.token_ids[:_IDS])) if score.text is None else score.text
    figures = [f"{len(score.token_ids):,}", f"{score.logprob:,.3f}", f"{score.mean_logprob:,.3f}"]
    said = one_line(what, _TEXT)
    return [text(score.index), text(score.choice), f"<b>{said}</b>" if is_best else said, *figures]
