"""A Timeline as pictures: tokens of each step, KV cache, running sequences, and where the time went."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...wording import shown_size
from ..timeline import PHASES, Timeline
from . import axes
from .axes import WIDTH, number, rectangle, titled
from .markup import count, legend, percent, seconds, several, text
from .theme import SERIES

_MOST_COLUMNS, _MOST_TOOLTIPS = 300, 100
_TOKENS_HEIGHT, _CACHE_HEIGHT, _RUNNING_HEIGHT = 110, 64, 44
_PROMPTS, _ANSWERS, _CACHE, _RUNNING = 0, 1, 2, 3  # numbers of their colours
_HEADROOM = 1.06  # times the highest value
_FULL_ENOUGH = 0.25  # share of the KV cache that must have been used for its whole size to be drawn
_LEAST_PHASE = 0.005  # share of the time; shorter phases are drawn as one


@dataclass(frozen=True, eq=False)
class Columns:
    """Stretches of time, side by side."""

    edges: np.ndarray  # [columns + 1] seconds
    steps: np.ndarray  # [columns]
    prompt_tokens: np.ndarray  # [columns] average of a step
    decode_tokens: np.ndarray  # [columns] average of a step
    running: np.ndarray  # [columns] maximum
    cache_bytes: np.ndarray  # [columns] maximum

    def __len__(self) -> int:
        return len(self.steps)


def columns(timeline: Timeline, most: int = _MOST_COLUMNS) -> Columns:
    """At most ``most`` columns: neighbouring stretches are joined."""
    begins = np.arange(0, len(timeline), max(1, -(-len(timeline) // most)))
    lasts = np.append(begins[1:], len(timeline)) - 1
    steps = np.add.reduceat(timeline.steps, begins)
    each = np.maximum(steps, 1)
    edges = np.append(float(timeline.begin), np.asarray(timeline.ends, float)[lasts])
    return Columns(
        np.maximum.accumulate(edges),
        steps,
        np.add.reduceat(timeline.prompt_tokens, begins) / each,
        np.add.reduceat(timeline.decode_tokens, begins) / each,
        np.maximum.reduceat(timeline.running, begins),
        np.maximum.reduceat(timeline.cache_bytes, begins),
    )


def timeline_panels(timeline: Timeline, kv_memory: int) -> str:
    """Three panels above one axis of time; empty if there was no step."""
    if not len(timeline):
        return ""
    drawn, with_tooltips = columns(timeline), columns(timeline, _MOST_TOOLTIPS)
    end = max(float(drawn.edges[-1]), sum(timeline.phases.values()))
    if not 0 < end < math.inf:
        return ""
    tooltips = _Tooltips(with_tooltips, with_tooltips.edges * WIDTH / end)
    x = drawn.edges * WIDTH / end
    return "".join(
        (
            _tokens(drawn, x, tooltips),
            _cache(drawn, x, tooltips, kv_memory),
            _running(drawn, x, tooltips),
            axes.x_axis(end, lambda at: f"{at:.6g}", "seconds since the call began"),
        )
    )


# -- the panels --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Tooltips:
    columns: Columns
    x: np.ndarray

    def over(self, height: int, describe: Callable[[Columns, int], str]) -> str:
        parts = []
        for at in range(len(self.columns)):
            edges = self.columns.edges
            tooltip = f"{seconds(edges[at])} to {seconds(edges[at + 1])}: {describe(self.columns, at)}"
            parts.append(titled(tooltip, rectangle("hfb-hit", self.x[at], 0, self.x[at + 1], height)))
        return "".join(parts)


def _tokens(drawn: Columns, x: np.ndarray, tooltips: _Tooltips) -> str:
    height = _TOKENS_HEIGHT
    both = drawn.prompt_tokens + drawn.decode_tokens
    limit = max(float(both.max()), 1.0) * _HEADROOM
    floor = np.full(len(drawn), float(height))
    answers, total = height - drawn.decode_tokens * height / limit, height - both * height / limit
    drawing = _area(f"hfb-c{_PROMPTS}", x, answers, total) + _area(f"hfb-c{_ANSWERS}", x, floor, answers)
    if drawn.decode_tokens.any():  # a line keeps a few tokens visible beside thousands
        drawing += _line(f"hfb-l{_ANSWERS}", x, answers)

    def describe(columns: Columns, at: int) -> str:
        prompts, answers = count(columns.prompt_tokens[at]), count(columns.decode_tokens[at])
        steps = several(int(columns.steps[at]), "step")
        return f"{steps}, each of {prompts} prompt tokens and {answers} answer tokens"

    drawing += tooltips.over(height, describe)
    colours = legend([(f"hfb-c{_PROMPTS}", "of prompts"), (f"hfb-c{_ANSWERS}", "of answers")])
    marks = [(height - at * height / limit, count(at)) for at in axes.ticks(limit, 4, whole=True)]
    return _head("Tokens in each step", colours) + axes.plot(drawing, height, marks, about="tokens in each step")


def _cache(drawn: Columns, x: np.ndarray, tooltips: _Tooltips, kv_memory: int) -> str:
    height = _CACHE_HEIGHT
    highest = float(drawn.cache_bytes.max())
    whole = kv_memory > 0 and highest >= _FULL_ENOUGH * kv_memory
    limit = max(highest, kv_memory if whole else 0.0, 1.0) * _HEADROOM
    level = height - drawn.cache_bytes * height / limit
    drawing = _area(f"hfb-c{_CACHE}", x, np.full(len(drawn), float(height)), level)
    if whole:
        y = number(height - kv_memory * height / limit)
        drawing += f'<line class="hfb-size" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>'
    drawing += tooltips.over(
        height, lambda columns, at: f"{shown_size(int(columns.cache_bytes[at]))} of KV cache in use"
    )
    summary = f"{shown_size(int(highest))} at most"
    if kv_memory > 0:
        summary += f", {percent(highest / kv_memory)} of {shown_size(kv_memory)}{' (dashed)' if whole else ''}"
        summary += " that this call could use"
    unit = 1024 ** min(3, int(math.log2(limit) // 10))
    marks = [(height - at * unit * height / limit, _bytes(at, unit)) for at in axes.ticks(limit / unit, 2)]
    note = f'<span class="hfb-key">{text(summary)}</span>'
    return _head("KV cache", note) + axes.plot(drawing, height, marks, about=f"KV cache: {summary}")


def _bytes(at: float, unit: int) -> str:
    return f"{at:g} {shown_size(unit).split()[1]}" if at else "0"


def _running(drawn: Columns, x: np.ndarray, tooltips: _Tooltips) -> str:
    height = _RUNNING_HEIGHT
    highest = int(drawn.running.max())
    limit = max(highest, 1) * _HEADROOM
    level = height - drawn.running * height / limit
    drawing = _area(f"hfb-c{_RUNNING} hfb-pale", x, np.full(len(drawn), float(height)), level)
    drawing += _line(f"hfb-l{_RUNNING}", x, level)
    drawing += tooltips.over(height, lambda columns, at: several(int(columns.running[at]), "sequence"))
    marks = [(height - at * height / limit, count(at)) for at in axes.ticks(limit, 2, whole=True)]
    note = f'<span class="hfb-key">{highest:,} at most</span>'
    return _head("Sequences running", note) + axes.plot(drawing, height, marks, about="sequences running")


def _head(title: str, right: str) -> str:
    return f'<div class="hfb-head"><b>{title}</b>{right}</div>'


def _stairs(x: np.ndarray, y: np.ndarray) -> str:
    """An SVG path along the columns' levels. Equal neighbours share one line."""
    parts = [f"M{number(x[0])} {number(y[0])}"]
    for at in range(1, len(y)):
        if number(y[at]) != number(y[at - 1]):
            parts.append(f"H{number(x[at])}V{number(y[at])}")
    parts.append(f"H{number(x[-1])}")
    return "".join(parts)


def _line(kind: str, x: np.ndarray, y: np.ndarray) -> str:
    return f'<path class="{kind}" d="{_stairs(x, y)}"/>'


def _area(kind: str, x: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> str:
    back = _stairs(x[::-1], lower[::-1]).replace("M", "L")
    return f'<path class="{kind}" d="{_stairs(x, upper)}{back}Z"/>'


# -- where the time went -----------------------------------------------------------------------------------------------


def phases_bar(timeline: Timeline) -> str:
    """One bar of all the seconds; empty if there are none."""
    spent = {name: value for name, value in timeline.phases.items() if 0 < value < math.inf}
    total = sum(spent.values())
    if not total:
        return ""
    parts = []  # (colour, name, seconds, tooltip)
    short: list[str] = []
    for place, (name, value) in enumerate(timeline.phases.items()):
        if name not in spent:
            continue
        if value < _LEAST_PHASE * total:
            short.append(name)
        else:
            parts.append((f"hfb-c{_colour(name, place)}", name, value, PHASES.get(name, "")))
    if len(short) == 1:
        parts.append(("hfb-own", short[0], spent[short[0]], PHASES.get(short[0], "")))
    elif short:
        parts.append(("hfb-own", "the rest", sum(spent[name] for name in short), ", ".join(short)))
    bar, entries = [], []
    for kind, name, value, meaning in parts:
        share = value / total
        title = text(f"{name}: {seconds(value)}, {percent(share)}{f'. {meaning}' if meaning else ''}")
        bar.append(f'<span class="{kind}" style="width:{100 * share:.2f}%" title="{title}"></span>')
        entries.append(
            f'<div title="{title}"><i class="{kind}"></i><span>{text(name)}</span>'
            f"<em>{seconds(value)}</em><em>{percent(share)}</em></div>"
        )
    return (
        _head("Where the time went", f'<span class="hfb-key">{seconds(total)} in all</span>')
        + f'<div class="hfb-bar">{"".join(bar)}</div><div class="hfb-parts">{"".join(entries)}</div>'
    )


def _colour(name: str, place: int) -> int:
    """By place. The model's own time always has the first colour, which stands out."""
    if name == "model":
        return 0
    others = [each for each in PHASES if each != "model"]
    return 1 + (others.index(name) if name in others else place) % (SERIES - 1)
