"""A ScoreResult as a table: one row for each continuation, the likeliest of each context marked."""

from __future__ import annotations

from .markup import one_line, percent, seconds, several, table, text, view
from .protocols import ShownScore, ShownScores
from .report import interrupted

_ROWS_SHOWN = 40
_TEXT_CHARACTERS = 160
_IDS_SHOWN = 24  # token ids, where there is no text


def scores_html(result: ShownScores) -> str:
    best = _likeliest(result)
    rows = [_row(score, (score.index, score.choice) in best) for score in result[:_ROWS_SHOWN]]
    body = f'<div class="hfb-title">{text(several(len(result), "score"))}</div>'
    report = result.report
    if report is not None:
        body += interrupted(report)
    if rows:
        body += table(["#", "choice", "continuation", "tokens", "log-probability", "a token"], rows, 3)
    if len(result) > _ROWS_SHOWN:
        body += f'<div class="hfb-caption">{text(f"… {len(result) - _ROWS_SHOWN:,} more")}</div>'
    if report is not None:
        headline = f"In {seconds(report.seconds)}, {percent(report.saving)} of tokens saved. More in .report"
        body += f'<div class="hfb-caption">{text(headline)}</div>'
    return view(body, repr(result))


def _likeliest(result: ShownScores) -> set[tuple[int, int | None]]:
    """(index, choice) of the likeliest continuation of each context that has several."""
    if not result.complete:
        return set()
    pairs = zip(result.by_context, result.best(), strict=True)
    return {(scores[0].index, choice) for scores, choice in pairs if len(scores) > 1}


def _row(score: ShownScore, is_best: bool) -> list[str]:
    if score.error is not None:
        error = f'<span class="hfb-bad">{one_line(score.error, _TEXT_CHARACTERS)}</span>'
        return [text(score.index), text(score.choice), error, "", "", ""]
    shown = " ".join(map(str, score.token_ids[:_IDS_SHOWN])) if score.text is None else score.text
    figures = [f"{len(score.token_ids):,}", f"{score.logprob:,.3f}", f"{score.mean_logprob:,.3f}"]
    line = one_line(shown, _TEXT_CHARACTERS)
    return [text(score.index), text(score.choice), f"<b>{line}</b>" if is_best else line, *figures]
