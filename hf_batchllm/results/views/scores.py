"""A ScoreResult as a table: contexts, and below each its continuations with their probabilities among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .markup import from_a_word, one_line, percent, seconds, several, text, to_a_word, view
from .protocols import ShownScore, ShownScores
from .report import BY_INDEX, interrupted, saved

_FIRST_ROWS, _LAST_ROWS = 30, 10  # shown; all rows if there are no more than these together
_MOST_ROWS = _FIRST_ROWS + _LAST_ROWS
_TEXT_CHARACTERS = 160
_CONTEXT_START, _CONTEXT_END = 60, 140  # characters shown of a long context
_TOOLTIP_CHARACTERS = 1000
_FIGURES = ("among these", "log-probability", "a token", "tokens")
_IDS_SHOWN = 24  # token ids, where there is no text


def scores_html(result: ShownScores, is_slice: bool = False) -> str:
    body = f'<div class="hfb-title">{text(several(len(result), "score"))}</div>'
    report = result.report
    if report is not None:
        body += interrupted(report, BY_INDEX)
    body += _table(result)
    if report is not None:
        whole = "The whole call: in" if is_slice or not result.complete else ""
        share = f"{percent(report.saving)} of tokens {saved(report)}"
        headline = f"{whole or 'In'} {seconds(report.seconds)}, {share}. More in .report"
        body += f'<div class="hfb-caption">{text(headline)}</div>'
    return view(body, repr(result))


def _table(result: ShownScores) -> str:
    contexts = list(result.by_context)
    if not contexts:
        return ""
    compared = any(len(scores) > 1 for scores in contexts)
    best = result.best()
    named = any(score.context is not None for scores in contexts for score in scores)
    among = result.probabilities
    first, last = _shown(contexts)
    columns = 5 + named + compared
    lines: list[str] = []
    for at, scores in enumerate(contexts):
        if at == first < last:
            hidden = sum(map(len, contexts[first:last]))
            lines.append(_more(f"{several(last - first, 'more context')}, {several(hidden, 'score')}", columns))
        if first <= at < last:
            continue
        likeliest = best[at] if len(scores) > 1 else None
        lines += _rows(scores[:_MOST_ROWS], among[at], likeliest, named, compared)
        if len(scores) > _MOST_ROWS:
            lines.append(_more(f"{len(scores) - _MOST_ROWS:,} more of this context", columns))
    head = '<th colspan="2">context</th>' if named else '<th class="hfb-num">index</th>'
    head += "<th>continuation</th>"
    head += _figures(_FIGURES if compared else _FIGURES[1:], "th")
    kind = "hfb-scores hfb-named" if named else "hfb-scores"
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _shown(contexts: Sequence[Sequence[ShownScore]]) -> tuple[int, int]:
    """How many contexts are shown from the first one on, and from which one on to the last; whole ones, where several
    fit."""
    rows = [min(len(scores), _MOST_ROWS) for scores in contexts]
    if sum(rows) <= _MOST_ROWS:
        return len(contexts), len(contexts)
    first, taken = 1, rows[0]
    while first < len(rows) and taken + rows[first] <= _FIRST_ROWS:
        taken, first = taken + rows[first], first + 1
    last, taken = len(rows), 0
    while last > first and taken + rows[last - 1] <= _LAST_ROWS:
        last, taken = last - 1, taken + rows[last - 1]
    return first, last


def _more(what: str, columns: int) -> str:
    return f'<tr class="hfb-more"><td colspan="{columns}">… {text(what)}</td></tr>'


def _rows(
    scores: Sequence[ShownScore], among: Sequence[float], likeliest: int | None, named: bool, compared: bool
) -> list[str]:
    """The continuations of a context, beside it."""
    span = f' rowspan="{len(scores)}"' if len(scores) > 1 else ""
    beside = f'<td class="hfb-num hfb-dim hfb-at"{span}>{text(scores[0].index)}</td>'
    if named:
        beside += f'<td class="hfb-context"{span}>{_context(scores[0].context)}</td>'
    lines, kind = [], ' class="hfb-group"'
    for score, probability in zip(scores, among, strict=False):
        lines.append(f"<tr{kind}>{beside}{_cells(score, probability, score.choice == likeliest, compared)}</tr>")
        beside = kind = ""
    return lines


def _cells(score: ShownScore, probability: float, is_best: bool, compared: bool) -> str:
    if score.error is not None:
        error = f'<span class="hfb-bad">{one_line(score.error, _TEXT_CHARACTERS)}</span>'
        return f'<td class="hfb-said-choice">{error}</td>' + _figures([""] * (3 + compared), "td")
    said = " ".join(map(str, score.token_ids[:_IDS_SHOWN])) if score.text is None else score.text
    line = one_line(said, _TEXT_CHARACTERS)
    if said[:1] == " ":  # it changes the score, and could not be seen
        line = f'<span class="hfb-nl">␣</span>{line}'
    figures = [f"{score.logprob:,.3f}", f"{score.mean_logprob:,.3f}", f"{len(score.token_ids):,}"]
    if compared:
        figures.insert(0, _bar(probability, is_best))
    return f'<td class="hfb-said-choice">{f"<b>{line}</b>" if is_best else line}</td>' + _figures(figures, "td")


def _figures(cells: Sequence[str], tag: str) -> str:
    """A narrow view has room for the first of them."""
    kinds = ("hfb-num", *["hfb-num hfb-wide"] * (len(cells) - 1))
    return "".join(f'<{tag} class="{kind}">{cell}</{tag}>' for kind, cell in zip(kinds, cells, strict=True))


def _bar(probability: float, is_best: bool) -> str:
    if math.isnan(probability):
        return '<span class="hfb-dim">–</span>'
    shown = percent(probability)
    fill = f'<i class="hfb-c{0 if is_best else 8}" style="width:{100 * probability:.1f}%"></i>'
    figure = f"<b>{text(shown)}</b>" if is_best else text(shown)
    return f'<span class="hfb-among">{fill}</span><span class="hfb-share">{figure}</span>'


def _context(context: Any) -> str:
    """The end of a context, where contexts differ, below its beginning. Of a chat, the last message."""
    if context is None:
        return '<span class="hfb-dim">–</span>'
    whole = str(context[-1].get("content", "")) if isinstance(context, list) and context else str(context)
    if len(whole) <= _CONTEXT_START + _CONTEXT_END:
        return f'<div class="hfb-text">{one_line(whole, _TOOLTIP_CHARACTERS)}</div>'
    title = whole
    if len(whole) > _TOOLTIP_CHARACTERS:
        title = f"{whole[: _TOOLTIP_CHARACTERS // 2]}\n…\n{whole[-_TOOLTIP_CHARACTERS // 2 :]}"
    # Both are cut already, and marks of line breaks are longer than these.
    start = one_line(to_a_word(whole, _CONTEXT_START), _TOOLTIP_CHARACTERS)
    end = one_line(from_a_word(whole, _CONTEXT_END), _TOOLTIP_CHARACTERS)
    return (
        f'<div title="{text(title)}"><div class="hfb-start hfb-dim" dir="auto">{start}</div>'
        f'<div class="hfb-text" dir="auto">… {end}</div></div>'
    )
