"""A picture of the tokens of each step over time. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..results.timeline import Timeline

_PROMPTS, _DECODE, _INK = "#b4bcc6", "#2a6fbb", "#333333"
_TITLE_WIDTH = 110


def draw_steps(runs: Mapping[str, Timeline], path: Path, title: str) -> None:
    """One run below the other, over the same time.

    The axis is logarithmic: a step with prompts has thousands of tokens, one without a few hundred.
    """
    from matplotlib.figure import Figure  # not pyplot, which may open a window

    figure = Figure(figsize=(9, 1 + 2.2 * len(runs)), layout="constrained")
    rows = figure.subplots(len(runs), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, timeline) in zip(rows, runs.items(), strict=True):
        _draw(axes, timeline)
        axes.set_title(f"{name}: {timeline.ends[-1] - timeline.begin:,.1f} s", loc="left", fontsize=9, color=_INK)
    rows[0].legend(frameon=False, fontsize=8, loc="upper right")
    rows[-1].set_xlabel("seconds since the first step")
    figure.suptitle("\n".join(textwrap.wrap(title, _TITLE_WIDTH)), x=0.01, ha="left", fontsize=9, color=_INK)
    figure.savefig(path, dpi=150)


def _draw(axes: Any, timeline: Timeline) -> None:
    steps = np.maximum(timeline.steps, 1)
    decode, prompts = timeline.decode_tokens / steps, timeline.prompt_tokens / steps
    edges = np.concatenate([[timeline.begin], timeline.ends]) - timeline.begin
    axes.stairs(decode, edges, fill=True, color=_DECODE, label="decode rows of a step")
    axes.stairs(decode + prompts, edges, baseline=decode, fill=True, color=_PROMPTS, label="tokens of prompts")
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
