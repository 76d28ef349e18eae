"""Building blocks of a view. What comes from users is escaped by ``text``, ``one_line`` or ``marked``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .style import style

# Not allowed in HTML or XML: C0 and C1 controls except tab and newline, lone surrogates, and noncharacters.
_ILLEGAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_VISIBLE = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}
_TOOLTIP_CHARACTERS = 1000
DASH = '<span class="hfb-dim">–</span>'


def clean(value: Any) -> str:
    """``value`` as text that a page may hold: control characters become visible ones."""
    return _ILLEGAL.sub(lambda odd: _VISIBLE.get(ord(odd[0]), "\ufffd"), str(value).replace("\r\n", "\n"))


def shorter(value: str, most: int) -> str:
    return value if len(value) <= most else value[: most - 1].rstrip() + "…"


def text(value: Any, most: int | None = None) -> str:
    """Escaped, for content and attributes alike. After ``most`` characters comes an ellipsis."""
    return escape(clean(value if most is None else shorter(str(value), most)))


def one_line(value: Any, most: int) -> str:
    """Text with marks in place of line breaks."""
    return text(re.sub(r"\s*\n\s*", " ↵ ", clean(value).strip()), most)


def marked(value: str) -> str:
    """A paragraph of its own: line breaks and tabs as marks."""
    marks = {"\t": '<span class="hfb-nl">⇥ </span>', "\n": '<span class="hfb-nl">↵ </span>'}
    return re.sub("[\t\n]", lambda found: marks[found[0]], text(value))


def block(value: Any, most: int, kind: str = "") -> str:
    """The beginning of a text. A tooltip has what does not fit."""
    whole = str(value)
    if not whole:
        return '<span class="hfb-dim">(empty)</span>'
    title = f' title="{text(whole, _TOOLTIP_CHARACTERS)}"' if len(whole) > 120 else ""
    return f'<div class="hfb-text hfb-clamp{kind}" dir="auto"{title}>{marked(shorter(whole, most))}</div>'


def both_ends(start: str, end: str, most: tuple[int, int], is_whole: bool) -> str:
    """The beginning of a text, and its end below: what shares much differs at its end. Cut between words.

    start, end: the whole text twice if ``is_whole``, or the two ends of it that are known. most: characters of each.
    """
    if is_whole and len(start) <= sum(most):
        return block(start, len(start) + 1)
    half = _TOOLTIP_CHARACTERS // 2
    title = start if is_whole and len(start) <= _TOOLTIP_CHARACTERS else f"{start[:half]}\n…\n{end[-half:]}"
    first, last = _between_words(start, most[0]), _between_words(end[::-1], most[1])[::-1]
    return (
        f'<div title="{text(title)}"><div class="hfb-start hfb-dim" dir="auto">{marked(f"{first}…")}</div>'
        f'<div class="hfb-text hfb-clamp" dir="auto">… {marked(last.lstrip())}</div></div>'
    )


def _between_words(value: str, most: int) -> str:
    """The beginning of a text, up to the end of a word if there is one near."""
    cut = re.search(rf"\s\S{{0,{most // 5}}}\Z", value[: most + 1]) if len(value) > most else None
    return value[:most] if cut is None else value[: cut.start()].rstrip() + " "


def id_list(ids: Sequence[int], most: int = 24) -> str:
    """Where there is no text."""
    if len(ids) <= most:
        return f'<div class="hfb-ids hfb-clamp">{text(" ".join(map(str, ids)))}</div>'
    title, shown = (" ".join(map(str, ids[:count])) for count in (200, most))
    return f'<div class="hfb-ids hfb-clamp" title="{text(title, _TOOLTIP_CHARACTERS)}">{text(shown)} …</div>'


def count(number: float) -> str:
    """A number of things; an average below 100 keeps one decimal."""
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:,.1f}"


def percent(share: float) -> str:
    """One decimal; exactly 100 % and 0 % stand for all and nothing alone."""
    shown = f"{share:.1%}"
    if (shown == "100.0%" and share < 1) or (shown == "0.0%" and share > 0):
        return "> 99.9%" if share > 0.5 else "< 0.1%"
    return shown.replace("100.0", "100") if share else "0%"


def seconds(value: float) -> str:
    if value >= 0.995:
        return f"{value:,.0f} s" if value >= 100 else f"{value:.2f} s"
    return f"{1000 * value:.0f} ms" if value >= 0.01 or value <= 0 else f"{1000 * value:.2g} ms"


def view(title: str, body: str, plain: str) -> str:
    """A whole view. ``plain`` is shown where the style sheet is removed."""
    # Notebooks run MathJax over outputs, and "from $5 to $10" is no formula. MathJax 3 and 2 skip these classes.
    whole = f'<div class="hfb-title">{text(title)}</div>{body}'
    return (
        f'<div class="hfb mathjax_ignore tex2jax_ignore">{style()}<pre class="hfb-plain">{text(plain)}</pre>'
        f'<div class="hfb-view" style="display:none" hidden>{whole}</div></div>'
    )


def caption(sentence: str) -> str:
    return f'<div class="hfb-caption">{text(sentence)}</div>'


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Headline figures as (figure, name). The figure for tokens saved is emphasised."""
    cells = (
        f'<div class="hfb-tile{" hfb-gain" if "saved" in name and figure != "0%" else ""}"><b>{text(figure)}</b>'
        f"<span>{text(name)}</span></div>"
        for figure, name in figures
    )
    return f'<div class="hfb-tiles">{"".join(cells)}</div>'


def head(title: str, beside: str) -> str:
    """A line above a picture."""
    return f'<div class="hfb-head">{title}{beside}</div>'


def key(entries: Iterable[tuple[str, str]], before: str = "") -> str:
    """``entries``: (CSS class of the swatch, label)."""
    swatches = "".join(f'<span><i class="{kind}"></i>{text(label)}</span>' for kind, label in entries)
    return f'<div class="hfb-key">{f"<span>{text(before)}</span>" if before else ""}{swatches}</div>'


def folded(title: str, body: str) -> str:
    return f"<details><summary>{text(title)}</summary>{body}</details>"


def cells(*contents: tuple[str, str], tag: str = "td", more: str = "") -> str:
    """``contents``: (CSS classes, HTML)."""
    return "".join(f"<{tag}{_class(kind)}{more}>{content}</{tag}>" for kind, content in contents)


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def figures(first: str, *others: str, tag: str = "td") -> str:
    """Cells of a row in which all but the first are numbers."""
    return cells(("", first), *(("hfb-num", each) for each in others), tag=tag)


def table(kind: str, top: str, rows: Iterable[str]) -> str:
    """``top``: cells of the head. ``rows``: ``<tr>`` elements, or cells of one."""
    lines = (row if row.startswith("<tr") else f"<tr>{row}</tr>" for row in rows)
    above = f"<thead><tr>{top}</tr></thead>" if top else ""
    return f"<table{_class(kind)}>{above}<tbody>{''.join(lines)}</tbody></table>"


def grouped(beside: Sequence[tuple[str, str]], rows: Sequence[str]) -> list[str]:
    """Rows next to cells that all of them share: a prompt and its samples, a context and its continuations."""
    shared = cells(*beside, more=f' rowspan="{len(rows)}"' if len(rows) > 1 else "")
    return [f'<tr class="hfb-group">{shared}{rows[0]}</tr>', *rows[1:]]


def hidden(what: str, columns: int) -> str:
    return f'<tr class="hfb-more"><td colspan="{columns}">… {text(what)}</td></tr>'
