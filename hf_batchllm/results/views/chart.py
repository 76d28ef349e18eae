"""A plot: SVG that stretches with the width of the page, surrounded by text that does not.

In the SVG, x goes from 0 to ``WIDTH`` and y is in pixels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np

from .html import text

WIDTH = 1000


def ticks(limit: float, most: int, whole: bool = False) -> list[float]:
    """Round numbers from 0 to ``limit``, in at most ``most`` steps."""
    if not 0 < limit < math.inf:
        return [0.0]
    power = math.floor(math.log10(limit / most))
    sizes = (times * 10.0**exponent for exponent in itertools.count(power) for times in (1, 2, 5))
    size = next(size for size in sizes if int(limit / size) <= most and (size >= 1 or not whole))
    return [at * size for at in range(int(limit / size * (1 + 1e-9)) + 1)]


def plot(drawing: str, height: int, marks: Iterable[tuple[float, str]], about: str, over: str = "") -> str:
    """``marks``: (pixels from the top, label). ``over``: HTML that lies over the drawing."""
    lines, labels = [], []
    for y, label in marks:
        lines.append(f'<line class="hfb-grid" x1="0" x2="{WIDTH}" y1="{number(y)}" y2="{number(y)}"/>')
        labels.append(f'<span class="hfb-y" style="top:{number(y)}px">{text(label)}</span>')
    return (
        f'<div class="hfb-plot" style="height:{height}px">{"".join(labels)}'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" '
        f'role="img" aria-label="{text(about)}">{"".join(lines)}{drawing}</svg>{over}</div>'
    )


def x_axis(limit: float, title: str, whole: bool = False) -> str:
    spans = []
    for at in ticks(limit, 5, whole):
        share = at / limit if limit else 0.0
        kind = ' class="hfb-first"' if at == 0 else ' class="hfb-last"' if share > 0.97 else ""
        label = f"{at:,.0f}" if whole else f"{at:.6g}"
        spans.append(f'<span{kind} style="left:{100 * share:.2f}%">{label}</span>')
    return f'<div class="hfb-x">{"".join(spans)}</div><div class="hfb-axis">{text(title)}</div>'


def number(value: float) -> str:
    """Rounded to a tenth of a pixel, as short as possible."""
    return f"{value:.1f}".removesuffix(".0")


def rectangle(kind: str, left: float, top: float, right: float, bottom: float) -> str:
    """Rounds corners, not sizes, so that neighbours meet."""
    left, top, right, bottom = round(left, 1), round(top, 1), round(right, 1), round(bottom, 1)
    size = f'width="{number(right - left)}" height="{number(bottom - top)}"'
    return f'<rect class="{kind}" x="{number(left)}" y="{number(top)}" {size}/>'


def titled(title: str, drawing: str) -> str:
    """``drawing`` with a tooltip."""
    return f"<g><title>{text(title)}</title>{drawing}</g>"


def line(kind: str, edges: np.ndarray, y: np.ndarray) -> str:
    """Steps of a level each. edges: [steps + 1]. y: [steps]."""
    return f'<path class="{kind}" d="{_steps(edges, y)}"/>'


def area(kind: str, edges: np.ndarray, upper: np.ndarray, lower: np.ndarray) -> str:
    """What lies between two such lines."""
    back = _steps(edges[::-1], lower[::-1]).replace("M", "L")
    return f'<path class="{kind}" d="{_steps(edges, upper)}{back}Z"/>'


def _steps(edges: np.ndarray, y: np.ndarray) -> str:
    """Equal neighbours share one line."""
    places, levels = [number(x) for x in edges], [number(each) for each in y]
    ups = (f"H{places[at]}V{levels[at]}" for at in range(1, len(levels)) if levels[at] != levels[at - 1])
    return f"M{places[0]} {levels[0]}{''.join(ups)}H{places[-1]}"
