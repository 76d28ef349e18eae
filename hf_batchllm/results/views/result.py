"""A BatchResult as a table: prompts, answers, and why each ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from .markup import clean, from_a_word, percent, seconds, several, shorter, text, to_a_word, view
from .protocols import ShownGeneration, ShownGenerations
from .report import BY_INDEX, interrupted, saved
from .thumbnails import thumbnails

_FIRST_ROWS, _LAST_ROWS = 15, 5  # shown; all rows if there are no more than these together
_PROMPT_START, _PROMPT_END = 80, 100  # characters shown of a long prompt
_PROMPT_TOKENS = 250  # decoded at each end of a long prompt
_ANSWER_CHARACTERS = 320
_TOOLTIP_CHARACTERS = 1000
_RUN = 8  # equal tokens that follow each other
_IDS_SHOWN, _IDS_IN_TOOLTIP = 24, 200  # token ids, where there is no text

_NO_PROMPT = '<span class="hfb-dim">–</span>'

Decode = Callable[[list[int]], str | None]


def result_html(result: ShownGenerations, decode: Decode | None, is_slice: bool = False) -> str:
    generations = list(result)
    title = f'<div class="hfb-title">{text(several(len(generations), "generation"))}</div>'
    report = "" if result.report is None else interrupted(result.report, BY_INDEX)
    rows = _rows(generations, decode)
    return view(f"{title}{report}{rows}{_headline(result, is_slice)}", repr(result))


def _headline(result: ShownGenerations, is_slice: bool) -> str:
    report = result.report
    if report is None:
        return ""
    before = "The whole call: " if is_slice or report.finished < report.sequences else ""
    headline = (
        f"{before}{report.new_tokens:,} new tokens in {seconds(report.seconds)} ({report.tokens_per_second:,.0f} / s), "
        f"{percent(report.saving)} of prompt tokens {saved(report)}. More in .report"
    )
    return f'<div class="hfb-caption">{text(headline)}</div>'


def _rows(generations: Sequence[ShownGeneration], decode: Decode | None) -> str:
    if not generations:
        return ""
    sampled = any(generation.sample for generation in generations)
    hidden = max(0, len(generations) - _FIRST_ROWS - _LAST_ROWS)
    head = generations if not hidden else generations[:_FIRST_ROWS]
    lines = _grouped(head, decode, sampled)
    if hidden:
        lines.append(f'<tr class="hfb-more"><td colspan="{5 + sampled}">… {hidden:,} more</td></tr>')
        lines += _grouped(generations[-_LAST_ROWS:], decode, sampled)
    sample = '<th class="hfb-num">sample</th>' if sampled else ""
    titles = f'<th colspan="2">prompt</th>{sample}<th>answer</th><th>ended</th><th class="hfb-num">tokens</th>'
    return f'<table class="hfb-rows"><thead><tr>{titles}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _grouped(generations: Sequence[ShownGeneration], decode: Decode | None, sampled: bool) -> list[str]:
    """Table rows; the samples of a prompt follow each other beside it."""
    lines = []
    at = 0
    while at < len(generations):
        first = generations[at]
        after = at + 1
        while after < len(generations) and generations[after].index == first.index:
            after += 1
        span = f' rowspan="{after - at}"' if after - at > 1 else ""
        prompt = (
            f'<td class="hfb-num hfb-dim hfb-at"{span}>{text(first.index)}</td>'
            f'<td class="hfb-prompt"{span}>{_prompt(first, decode)}</td>'
        )
        kind = ' class="hfb-group"'
        for generation in generations[at:after]:
            lines.append(f"<tr{kind}>{prompt}{_cells(generation, sampled)}</tr>")
            prompt = kind = ""
        at = after
    return lines


def _cells(generation: ShownGeneration, sampled: bool) -> str:
    why = str(generation.finish_reason)
    sample = f'<td class="hfb-num hfb-dim hfb-sample">{text(generation.sample)}</td>' if sampled else ""
    if generation.error is not None:
        answer = _block(generation.error, _ANSWER_CHARACTERS, "hfb-bad")
    elif generation.text is not None:
        answer = _block(generation.text, _ANSWER_CHARACTERS)
    else:
        answer = _ids(generation.token_ids)
    kind = "hfb-why hfb-error" if why == "error" or generation.error is not None else "hfb-why"
    tokens = f'<td class="hfb-num hfb-new">{len(generation.token_ids):,}</td>'
    ended = f'<td class="hfb-ended"><span class="{kind}">{text(why)}</span></td>'
    return f'{sample}<td class="hfb-answer">{answer}</td>{ended}{tokens}'


def _prompt(generation: ShownGeneration, decode: Decode | None) -> str:
    """Its images, its beginning and its end: prompts that share much differ at their ends."""
    pictures = thumbnails(generation.prompt) if isinstance(generation.prompt, list) else ""
    return pictures + _words(generation, decode, bool(pictures))


def _words(generation: ShownGeneration, decode: Decode | None, has_images: bool) -> str:
    ids, passed = list(generation.prompt_token_ids), generation.prompt
    if has_images:
        ids = _without_runs(ids)
    if not ids:  # it could not be run
        return _block(passed, _PROMPT_START + _PROMPT_END) if isinstance(passed, str) else _NO_PROMPT
    long = len(ids) > 2 * _PROMPT_TOKENS
    start = _decoded(decode, ids[:_PROMPT_TOKENS] if long else ids)
    if start is None and isinstance(passed, str):  # of a result that was pickled, say
        start, long = passed, False
    if start is None:
        return _ids(ids)
    end = start
    if long:  # a character may be cut off in the middle
        start, end = start.rstrip("\ufffd"), (_decoded(decode, ids[-_PROMPT_TOKENS:]) or "").lstrip("\ufffd")
    if not long and len(start) <= _PROMPT_START + _PROMPT_END:
        return _block(start, len(start) + 1)
    title = start if not long and len(start) <= _TOOLTIP_CHARACTERS else _both_ends(start, end)
    begins, ends = _marked(to_a_word(start, _PROMPT_START)), _marked(from_a_word(end, _PROMPT_END))
    return (
        f'<div title="{text(title)}"><div class="hfb-start hfb-dim" dir="auto">{begins}</div>'
        f'<div class="hfb-text hfb-clamp" dir="auto">… {ends}</div></div>'
    )


def _without_runs(ids: Sequence[int]) -> list[int]:
    """An image is one token many times over, which says no more than one."""
    kept = []
    for token, run in groupby(ids):
        many = list(run)
        kept += many if len(many) < _RUN else [token]
    return kept


def _both_ends(start: str, end: str) -> str:
    half = _TOOLTIP_CHARACTERS // 2
    return f"{start[:half]}\n…\n{end[-half:]}"


def _decoded(decode: Decode | None, ids: list[int]) -> str | None:
    """None without a tokenizer, or if it fails: the table then shows ids."""
    if decode is None:
        return None
    try:
        decoded = decode(ids)
    except Exception:
        return None
    return decoded if isinstance(decoded, str) else None


def _block(value: Any, most: int, kind: str = "") -> str:
    """Text as it is. A tooltip has what does not fit."""
    whole = str(value)
    if not whole:
        return '<span class="hfb-dim">(empty)</span>'
    title = f' title="{text(whole, _TOOLTIP_CHARACTERS)}"' if len(whole) > 120 else ""
    classes = f"hfb-text hfb-clamp{f' {kind}' if kind else ''}"
    return f'<div class="{classes}" dir="auto"{title}>{_marked(shorter(whole, most))}</div>'


def _marked(value: str) -> str:
    """Line breaks as marks: each text is one paragraph in the table."""
    return (
        text(clean(value))
        .replace("\t", '<span class="hfb-nl">⇥ </span>')
        .replace("\n", '<span class="hfb-nl">↵ </span>')
    )


def _ids(ids: Sequence[int]) -> str:
    shown = " ".join(str(token) for token in ids[:_IDS_SHOWN])
    more = " …" if len(ids) > _IDS_SHOWN else ""
    title = f' title="{text(" ".join(map(str, ids[:_IDS_IN_TOOLTIP])), _TOOLTIP_CHARACTERS)}"' if more else ""
    return f'<div class="hfb-ids hfb-clamp"{title}>{text(shown)}{more}</div>'
