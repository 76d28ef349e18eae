"""A Timeline as pictures: what steps ran over, what the KV cache held, what was running; and where the time went."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...wording import shown_size
from ..timeline import PHASES, Timeline
from . import axes
from .axes import WIDTH, number, rectangle, titled
from .markup import count, key, percent, seconds, several, text
from .theme import SERIES

_MOST_COLUMNS, _MOST_TOOLTIPS = 300, 100
_TOKENS_HEIGHT, _CACHE_HEIGHT, _RUNNING_HEIGHT = 110, 64, 44
_PROMPTS, _ANSWERS, _CACHE, _RUNNING = 0, 1, 2, 3  # colours of what is drawn
_ROOM = 1.06  # above the highest
_FULL_ENOUGH = 0.25  # of its size, what the KV cache must have held for the whole size to be drawn
_LEAST_PHASE = 0.005  # of the time; shorter phases are one together


@dataclass(frozen=True, eq=False)
class Columns:
    """Stretches of time, side by side."""

    edges: np.ndarray  # [columns + 1] seconds
    steps: np.ndarray  # [columns]
    prompt_tokens: np.ndarray  # [columns] in each step, on average
    decode_tokens: np.ndarray  # [columns] the same
    running: np.ndarray  # [columns] at most
    cache_bytes: np.ndarray  # [columns] at most

    def __len__(self) -> int:
        return len(self.steps)


def columns(timeline: Timeline, most: int = _MOST_COLUMNS) -> Columns:
    """No more than ``most``: neighbouring stretches are taken together."""
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


def course_of(timeline: Timeline, kv_memory: int) -> str:
    """Panels above one axis of time; empty where there was no step."""
    if not len(timeline):
        return ""
    drawn, pointed_at = columns(timeline), columns(timeline, _MOST_TOOLTIPS)
    end = max(float(drawn.edges[-1]), sum(timeline.phases.values()))
    if not 0 < end < math.inf:
        return ""
    tooltips = _Tooltips(pointed_at, pointed_at.edges * WIDTH / end)
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

    def over(self, height: int, say: Callable[[Columns, int], str]) -> str:
        parts = []
        for at in range(len(self.columns)):
            edges = self.columns.edges
            said = f"{seconds(edges[at])} to {seconds(edges[at + 1])}: {say(self.columns, at)}"
            parts.append(titled(said, rectangle("hfb-hit", self.x[at], 0, self.x[at + 1], height)))
        return "".join(parts)


def _tokens(drawn: Columns, x: np.ndarray, tooltips: _Tooltips) -> str:
    height = _TOKENS_HEIGHT
    both = drawn.prompt_tokens + drawn.decode_tokens
    limit = max(float(both.max()), 1.0) * _ROOM
    floor = np.full(len(drawn), float(height))
    answers, all_of_it = height - drawn.decode_tokens * height / limit, height - both * height / limit
    drawing = _area(f"hfb-c{_PROMPTS}", x, answers, all_of_it) + _area(f"hfb-c{_ANSWERS}", x, floor, answers)
    if drawn.decode_tokens.any():  # a few tokens beside thousands are still seen
        drawing += _line(f"hfb-l{_ANSWERS}", x, answers)

    def say(columns: Columns, at: int) -> str:
        prompts, answers = count(columns.prompt_tokens[at]), count(columns.decode_tokens[at])
        steps = several(int(columns.steps[at]), "step")
        return f"{steps}, each of {prompts} prompt tokens and {answers} answer tokens"

    drawing += tooltips.over(height, say)
    legend = key([(f"hfb-c{_PROMPTS}", "of prompts"), (f"hfb-c{_ANSWERS}", "of answers")])
    marks = [(height - at * height / limit, count(at)) for at in axes.ticks(limit, 4, whole=True)]
    return _head("Tokens in each step", legend) + axes.plot(drawing, height, marks, about="tokens in each step")


def _cache(drawn: Columns, x: np.ndarray, tooltips: _Tooltips, kv_memory: int) -> str:
    height = _CACHE_HEIGHT
    highest = float(drawn.cache_bytes.max())
    whole = kv_memory > 0 and highest >= _FULL_ENOUGH * kv_memory
    limit = max(highest, kv_memory if whole else 0.0, 1.0) * _ROOM
    level = height - drawn.cache_bytes * height / limit
    drawing = _area(f"hfb-c{_CACHE}", x, np.full(len(drawn), float(height)), level)
    if whole:
        y = number(height - kv_memory * height / limit)
        drawing += f'<line class="hfb-size" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>'
    drawing += tooltips.over(
        height, lambda columns, at: f"{shown_size(int(columns.cache_bytes[at]))} of KV cache in use"
    )
    said = f"{shown_size(int(highest))} at most"
    if kv_memory > 0:
        said += f", {percent(highest / kv_memory)} of {shown_size(kv_memory)}{' (dashed)' if whole else ''}"
    unit = 1024 ** min(3, int(math.log2(limit) // 10))
    marks = [(height - at * unit * height / limit, _bytes(at, unit)) for at in axes.ticks(limit / unit, 2)]
    note = f'<span class="hfb-key">{text(said)}</span>'
    return _head("KV cache", note) + axes.plot(drawing, height, marks, about=f"KV cache: {said}")


def _bytes(at: float, unit: int) -> str:
    return f"{at:g} {shown_size(unit).split()[1]}" if at else "0"


def _running(drawn: Columns, x: np.ndarray, tooltips: _Tooltips) -> str:
    height = _RUNNING_HEIGHT
    highest = int(drawn.running.max())
    limit = max(highest, 1) * _ROOM
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
    """From the first edge to the last one, at the level of each column; levels that stay cost nothing."""
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


def phases_of(timeline: Timeline) -> str:
    """One bar of all the seconds; empty where there are none."""
    spent = {name: value for name, value in timeline.phases.items() if 0 < value < math.inf}
    total = sum(spent.values())
    if not total:
        return ""
    parts = []  # (colour, name, seconds, tooltip)
    few: list[str] = []
    for place, (name, value) in enumerate(timeline.phases.items()):
        if name not in spent:
            continue
        if value < _LEAST_PHASE * total:
            few.append(name)
        else:
            parts.append((f"hfb-c{_colour(name, place)}", name, value, PHASES.get(name, "")))
    if len(few) == 1:
        parts.append(("hfb-own", few[0], spent[few[0]], PHASES.get(few[0], "")))
    elif few:
        parts.append(("hfb-own", "the rest", sum(spent[name] for name in few), ", ".join(few)))
    bar, legend = [], []
    for kind, name, value, said in parts:
        share = value / total
        title = text(f"{name}: {seconds(value)}, {percent(share)}{f'. {said}' if said else ''}")
        bar.append(f'<span class="{kind}" style="width:{100 * share:.2f}%" title="{title}"></span>')
        legend.append(
            f'<div title="{title}"><i class="{kind}"></i><span>{text(name)}</span>'
            f"<em>{seconds(value)}</em><em>{percent(share)}</em></div>"
        )
    return (
        _head("Where the time went", f'<span class="hfb-key">{seconds(total)} in all</span>')
        + f'<div class="hfb-bar">{"".join(bar)}</div><div class="hfb-parts">{"".join(legend)}</div>'
    )


def _colour(name: str, place: int) -> int:
    """By place, but for the phase that a call is there for: that one stands out, whatever comes before it."""
    if name == "model":
        return 0
    return 1 + place % (SERIES - 1)
