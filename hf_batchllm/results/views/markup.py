"""HTML helpers. Everything that comes from users goes through ``text`` on its way into a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .theme import STYLE

# Not allowed in HTML or XML: C0 and C1 controls except tab and newline, lone surrogates, and noncharacters.
_ILLEGAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_CONTROL_PICTURES = 0x2400


def clean(value: Any) -> str:
    """``value`` as text that a page may hold: control characters become visible ones."""
    return _ILLEGAL.sub(_visible, str(value).replace("\r\n", "\n"))


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(_CONTROL_PICTURES + code)
    return "\u2421" if code == 0x7F else "\ufffd"


def text(value: Any, most: int | None = None) -> str:
    """Escaped, for content and attributes alike. After ``most`` characters comes an ellipsis."""
    shown = clean(value if most is None else shorter(str(value), most))
    return escape(shown, quote=True)


def shorter(value: str, most: int) -> str:
    return value if len(value) <= most else value[: most - 1].rstrip() + "…"


def to_a_word(value: str, most: int) -> str:
    """The beginning of a text and an ellipsis, to the end of a word if one is near."""
    start, after = value[:most], value[most : most + 1]
    if not after.isspace():
        space = re.search(r"\s\S*$", start[-(most // 5) :]) if after else None
        if space is None:
            return f"{start}…"
        start = start[: len(start) - len(space[0])]
    return f"{start.rstrip()} …"


def from_a_word(value: str, most: int) -> str:
    """The end of a text, from the beginning of a word if one is near."""
    end = value[-most:]
    if len(value) > most and not value[-most - 1].isspace():
        space = re.search(r"\s", end[: most // 5])
        end = end[space.end() :] if space else end
    return end.lstrip()


def one_line(value: Any, most: int) -> str:
    """Text with marks in place of line breaks."""
    flat = re.sub(r"\s*\n\s*", " ↵ ", clean(value).strip())
    return escape(shorter(flat, most), quote=True)


def count(number: float) -> str:
    """A number of things; an average below 100 keeps one decimal."""
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:,.1f}"


def several(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """One decimal; exactly 100 % and 0 % stand for all and nothing alone."""
    shown = f"{share:.1%}"
    if (shown == "100.0%" and share < 1) or (shown == "0.0%" and share > 0):
        return "> 99.9%" if share > 0.5 else "< 0.1%"
    return shown.replace("100.0", "100") if share else "0%"


def seconds(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f} s"
    if value >= 0.995:
        return f"{value:.2f} s"
    return f"{1000 * value:.0f} ms" if value >= 0.01 or value <= 0 else f"{1000 * value:.2g} ms"


# Notebooks run MathJax over outputs, and "from $5 to $10" is no formula. MathJax 3 and 2 skip these classes.
_NO_FORMULAS = "mathjax_ignore tex2jax_ignore"


def view(body: str, plain: str) -> str:
    """A whole view. ``plain`` is shown where the style sheet is removed."""
    return (
        f'<div class="hfb {_NO_FORMULAS}">{STYLE}<pre class="hfb-plain">{text(plain)}</pre>'
        f'<div class="hfb-view" style="display:none" hidden>{body}</div></div>'
    )


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Headline figures as (figure, name). The figure for tokens saved is emphasised."""
    cells = (
        f'<div class="hfb-tile{" hfb-gain" if "saved" in name and figure != "0%" else ""}"><b>{text(figure)}</b>'
        f"<span>{text(name)}</span></div>"
        for figure, name in figures
    )
    return f'<div class="hfb-tiles">{"".join(cells)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int, narrow: bool = False) -> str:
    """Rows of HTML cells. The last ``numbers`` columns are aligned to the right."""

    def line(cells: Sequence[str], tag: str) -> str:
        first = len(cells) - numbers
        parts = (
            f'<{tag} class="hfb-num">{cell}</{tag}>' if at >= first else f"<{tag}>{cell}</{tag}>"
            for at, cell in enumerate(cells)
        )
        return f"<tr>{''.join(parts)}</tr>"

    top = f"<thead>{line([text(title) for title in head], 'th')}</thead>" if head else ""
    kind = ' class="hfb-narrow"' if narrow else ""
    return f"<table{kind}>{top}<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"


def legend(entries: Iterable[tuple[str, str]], before: str = "") -> str:
    """``entries``: (CSS class of the swatch, label)."""
    swatches = "".join(f'<span><i class="{kind}"></i>{text(label)}</span>' for kind, label in entries)
    word = f"<span>{text(before)}</span>" if before else ""
    return f'<div class="hfb-key">{word}{swatches}</div>'


def folded(title: str, body: str) -> str:
    return f"<details><summary>{text(title)}</summary>{body}</details>"
