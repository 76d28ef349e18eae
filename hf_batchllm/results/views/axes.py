"""A plot's frame: SVG that stretches with the width of the page, surrounded by text that does not.

In the SVG, x goes from 0 to ``WIDTH`` and y is in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from .markup import text

WIDTH = 1000


def ticks(limit: float, most: int, whole: bool = False) -> list[float]:
    """Round numbers from 0 to ``limit``, in at most ``most`` steps."""
    if not 0 < limit < math.inf:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(limit / most))
    while True:
        for times in (1, 2, 5):
            if int(limit / (step * times)) <= most and not (whole and step * times < 1):
                size = step * times
                return [at * size for at in range(int(limit / size * (1 + 1e-9)) + 1)]
        step *= 10


def plot(drawing: str, height: int, y_ticks: Iterable[tuple[float, str]], over: str = "", about: str = "") -> str:
    """``y_ticks``: (pixels from the top, label). ``over``: HTML that lies over the drawing."""
    lines, labels = [], []
    for y, label in y_ticks:
        lines.append(f'<line class="hfb-grid" x1="0" x2="{WIDTH}" y1="{number(y)}" y2="{number(y)}"/>')
        labels.append(f'<span class="hfb-y" style="top:{number(y)}px">{text(label)}</span>')
    return (
        f'<div class="hfb-plot" style="height:{height}px">{"".join(labels)}'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" '
        f'role="img" aria-label="{text(about)}">{"".join(lines)}{drawing}</svg>{over}</div>'
    )


def x_axis(limit: float, label: Callable[[float], str], title: str = "", whole: bool = False) -> str:
    spans = []
    marks = ticks(limit, 5, whole)
    for at in marks:
        share = at / limit if limit else 0.0
        kind = ' class="hfb-first"' if at == 0 else ' class="hfb-last"' if share > 0.97 else ""
        spans.append(f'<span{kind} style="left:{100 * share:.2f}%">{text(label(at))}</span>')
    axis = f'<div class="hfb-axis">{text(title)}</div>' if title else ""
    return f'<div class="hfb-x">{"".join(spans)}</div>{axis}'


def number(value: float) -> str:
    """Rounded to a tenth of a pixel, as short as possible."""
    short = f"{value:.1f}"
    return short[:-2] if short.endswith(".0") else short


def rectangle(kind: str, left: float, top: float, right: float, bottom: float) -> str:
    """Rounds corners, not sizes, so that neighbours meet."""
    left, top, right, bottom = round(left, 1), round(top, 1), round(right, 1), round(bottom, 1)
    return (
        f'<rect class="{kind}" x="{number(left)}" y="{number(top)}" width="{number(right - left)}" '
        f'height="{number(bottom - top)}"/>'
    )


def titled(title: str, drawing: str) -> str:
    """``drawing`` with a tooltip."""
    return f"<g><title>{text(title)}</title>{drawing}</g>"
