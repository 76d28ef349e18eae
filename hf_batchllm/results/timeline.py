"""Timeline: what the steps of a run ran over, what the KV cache held, and where the time went; and its pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ..wording import counted, shown_size
from .views.chart import WIDTH, area, line, number, plot, rectangle, ticks, titled, x_axis
from .views.html import count, head, key, percent, seconds, text
from .views.style import SERIES

# The phases of a call, in the order in which it comes to them, in words that a picture shows.
PHASES = {
    "prompts": "options and prompts are checked, and text becomes tokens",
    "loading": "only once, not in later calls: the tokenizer is loaded, stop strings are looked up in its vocabulary",
    "planning": "what the prompts share is found, and the order in which they run",
    "setup": "the KV cache is allocated; on a GPU, weights are merged and a step is rehearsed",
    "scheduling": "the next step is chosen and laid out for the model; requests and pages are kept track of",
    "launching": "on a GPU: the host hands steps over to the device, which works meanwhile",
    "capture": "on a GPU: decode steps are captured as CUDA graphs",
    "model": "the model runs; on a GPU: the host waits for the device, which runs it and picks tokens",
    "tokens": "the host picks tokens and looks for the ends of answers; on a GPU, it first waits for the model",
    "results": "results are put together, and tokens become text",
    "outside": "code outside the engine runs: the loop over a stream, a streamer, the progress bar",
}

_PHASES_SHOWN = 5  # in a line of text
_LEAST_SHARE_SHOWN = 0.01  # of the time
_LEAST_PHASE = 0.005  # of the time; shorter phases are drawn as one

_MOST_COLUMNS, _MOST_TOOLTIPS = 300, 100
_HEADROOM = 1.06  # times the highest value
_FULL_ENOUGH = 0.25  # share of the KV cache that must have been used for its whole size to be drawn


@dataclass(frozen=True, eq=False)
class Timeline:
    """A run as a few hundred stretches of time at most. Each stretch is one step, or several consecutive ones.

    A step counts when its tokens have come back. Steps still under way when a call broke off count at its end.

    begin: when the first stretch began, in seconds from the start of the call. Each stretch begins where the one before
        it ended.
    ends: when each stretch ended, in seconds from the start of the call.
    steps: the number of steps in each stretch.
    prompt_tokens: prompt tokens that the steps ran over. What a preemption makes them run over again counts, too, the
        answer so far included.
    decode_tokens: answer tokens that the steps ran over, one at a time.
    running: the most sequences that had begun and not ended; preempted ones begin anew.
    cache_bytes: the most bytes of the KV cache that held tokens.
    phases: the seconds of each phase of the call, in the order in which a call comes to them. They add up to the call's
        seconds. ``PHASES`` says what they mean.
    """

    begin: float
    ends: np.ndarray  # [stretches] float64
    steps: np.ndarray  # [stretches] int64
    prompt_tokens: np.ndarray  # [stretches] int64
    decode_tokens: np.ndarray  # [stretches] int64
    running: np.ndarray  # [stretches] int64
    cache_bytes: np.ndarray  # [stretches] int64
    phases: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def longest_phases(self) -> str:
        """Where most of the time went, in one line; empty if no time was spent."""
        total = sum(self.phases.values())
        shares = {phase: seconds / total for phase, seconds in self.phases.items()} if total > 0 else {}
        longest = sorted(shares.items(), key=lambda item: -item[1])[:_PHASES_SHOWN]
        return ", ".join(f"{phase} {share:.0%}" for phase, share in longest if share >= _LEAST_SHARE_SHOWN)

    def folded(self, most: int) -> Timeline:
        """At most ``most`` stretches: neighbours are joined."""
        first = np.arange(0, len(self), max(1, -(-len(self) // most)))
        ends = self.ends[np.append(first[1:], len(self)) - 1]
        counts = (self.steps, self.prompt_tokens, self.decode_tokens)
        steps, prompts, answers = (np.add.reduceat(each, first) for each in counts)
        running, cache = (np.maximum.reduceat(each, first) for each in (self.running, self.cache_bytes))
        return Timeline(self.begin, ends, steps, prompts, answers, running, cache, self.phases)


# -- pictures ----------------------------------------------------------------------------------------------------------


def timeline_panels(timeline: Timeline, kv_memory: int) -> str:
    """Three panels above one axis of time; empty if there was no step."""
    if not len(timeline):
        return ""
    end = max(float(_edges(timeline)[-1]), sum(timeline.phases.values()))
    if not 0 < end < math.inf:
        return ""
    panels = _Panels(timeline, end)
    return panels.tokens() + panels.cache(kv_memory) + panels.running() + x_axis(end, "seconds since the call began")


def _edges(timeline: Timeline) -> np.ndarray:
    return np.maximum.accumulate(np.append(float(timeline.begin), timeline.ends))


class _Panels:
    """Pictures over the same time, up to ``end``. Tooltips are coarser than what is drawn."""

    def __init__(self, timeline: Timeline, end: float) -> None:
        self.drawn, self.coarse = timeline.folded(_MOST_COLUMNS), timeline.folded(_MOST_TOOLTIPS)
        self.x, self.edges = (_edges(each) * WIDTH / end for each in (self.drawn, self.coarse))
        self.spans = [f"{begin} to {end}" for begin, end in pairwise(map(seconds, _edges(self.coarse)))]

    def tokens(self) -> str:
        drawn, coarse = self.drawn, self.coarse
        prompts, answers = drawn.prompt_tokens / drawn.steps, drawn.decode_tokens / drawn.steps
        layers = [("hfb-c0", prompts + answers, answers), ("hfb-c1", answers, 0 * answers)]
        if answers.any():  # a line keeps a few tokens visible beside thousands
            layers.append(("hfb-l1", answers, None))
        limit = max(float((prompts + answers).max()), 1.0) * _HEADROOM
        marks = [(at, count(at)) for at in ticks(limit, 4, whole=True)]
        tooltips = [
            f"{counted(n, 'step')}, each of {count(read / n)} prompt tokens and {count(written / n)} answer tokens"
            for n, read, written in zip(coarse.steps, coarse.prompt_tokens, coarse.decode_tokens, strict=True)
        ]
        colours = key([("hfb-c0", "of prompts"), ("hfb-c1", "of answers")])
        return self._panel("Tokens in each step", colours, 110, limit, marks, layers, tooltips)

    def cache(self, kv_memory: int) -> str:
        used = self.drawn.cache_bytes
        highest = int(used.max())
        whole = kv_memory if highest >= _FULL_ENOUGH * kv_memory else 0
        limit = max(highest, whole, 1) * _HEADROOM
        unit = 1024 ** min(3, int(math.log2(limit) // 10))
        marks = [(at * unit, f"{at:g} {shown_size(unit).split()[1]}" if at else "0") for at in ticks(limit / unit, 2)]
        summary = f"{shown_size(highest)} at most"
        if kv_memory > 0:
            share = f"{percent(highest / kv_memory)} of {shown_size(kv_memory)}{' (dashed)' if whole else ''}"
            summary += f", {share} that this call could use"
        tooltips = [f"{shown_size(each)} of KV cache in use" for each in self.coarse.cache_bytes.tolist()]
        layers = [("hfb-c2", used, 0 * used)]
        return self._panel("KV cache", _beside(summary), 64, limit, marks, layers, tooltips, whole)

    def running(self) -> str:
        running = self.drawn.running
        limit = max(int(running.max()), 1) * _HEADROOM
        marks = [(at, count(at)) for at in ticks(limit, 2, whole=True)]
        layers = [("hfb-c3 hfb-pale", running, 0 * running), ("hfb-l3", running, None)]
        tooltips = [counted(each, "sequence") for each in self.coarse.running.tolist()]
        beside = _beside(f"{running.max():,} at most")
        return self._panel("Sequences running", beside, 44, limit, marks, layers, tooltips)

    def _panel(
        self,
        title: str,
        beside: str,
        height: int,
        limit: float,
        marks: list[tuple[float, str]],
        layers: Sequence[tuple[str, np.ndarray, np.ndarray | None]],
        tooltips: list[str],
        dashed: int = 0,
    ) -> str:
        """height: in pixels, of ``limit``. dashed: a value, 0 for none.

        layers: (CSS classes, values, values that they are drawn above; None for a line).
        """

        def y(values: Any) -> Any:
            return height - values * height / limit

        drawing = "".join(
            line(kind, self.x, y(upper)) if lower is None else area(kind, self.x, y(upper), y(lower))
            for kind, upper, lower in layers
        )
        if dashed:
            level = number(y(dashed))
            drawing += f'<line class="hfb-size" x1="0" x2="{WIDTH}" y1="{level}" y2="{level}"/>'
        for (left, right), span, said in zip(pairwise(self.edges), self.spans, tooltips, strict=True):
            drawing += titled(f"{span}: {said}", rectangle("hfb-hit", left, 0, right, height))
        return head(f"<b>{title}</b>", beside) + plot(drawing, height, [(y(at), label) for at, label in marks], title)


def _beside(said: str) -> str:
    return f'<span class="hfb-key">{text(said)}</span>'


def phases_bar(phases: Mapping[str, float]) -> str:
    """One bar of all the seconds; empty if there are none."""
    spent = {name: value for name, value in phases.items() if 0 < value < math.inf}
    if not spent:
        return ""
    total = sum(spent.values())
    short = [name for name, value in spent.items() if value < _LEAST_PHASE * total]
    others = [name for name in (*PHASES, *phases) if name != "model"]
    parts = []  # (colour, name, seconds, what it means)
    for name, value in spent.items():
        if name not in short:
            colour = 0 if name == "model" else 1 + others.index(name) % (SERIES - 1)  # the model's stands out
            parts.append((f"hfb-c{colour}", name, value, PHASES.get(name, "")))
    if short:
        of_short, alone = sum(spent[name] for name in short), len(short) == 1
        meaning = PHASES.get(short[0], "") if alone else ", ".join(short)
        parts.append(("hfb-own", short[0] if alone else "the rest", of_short, meaning))
    bar, entries = "", ""
    for kind, name, value, meaning in parts:
        took, share = seconds(value), percent(value / total)
        title = text(f"{name}: {took}, {share}{f'. {meaning}' if meaning else ''}")
        bar += f'<span class="{kind}" style="width:{100 * value / total:.2f}%" title="{title}"></span>'
        entries += (
            f'<div title="{title}"><i class="{kind}"></i><span>{text(name)}</span><em>{took}</em><em>{share}</em></div>'
        )
    above = head("<b>Where the time went</b>", _beside(f"{seconds(total)} in all"))
    return f'{above}<div class="hfb-bar">{bar}</div><div class="hfb-parts">{entries}</div>'
