"""The figures as a picture. matplotlib is only needed here (the extra `bench`)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .measuring import Row
from .sweeps import DegreeSweep
from .workload import Mix

_OURS, _RIVAL, _FLOOR, _INK = "#2a6fbb", "#b4bcc6", "#c0392b", "#333333"
_TITLE_WIDTH = 110


def plot_contenders(path: Path, rows: Sequence[Row], title: str) -> None:
    """A bar for each, ours on top; the floor as a line."""
    shown = [row for row in rows if not row.error][::-1]
    figure, axes = _axes(8, 1.6 + 0.45 * len(shown), title)
    by_tokens = isinstance(rows[0].workload, Mix)  # where prompts differ, the first few are no fair part of them
    speeds = [row.new_tokens_per_second if by_tokens else row.prompts_per_second for row in shown]
    bars = axes.barh([row.name for row in shown], speeds, color=[_OURS if row is rows[0] else _RIVAL for row in shown])
    axes.bar_label(
        bars, [f"{speed:,.0f}" if speed >= 1000 else f"{speed:,.3g}" for speed in speeds], padding=4, color=_INK
    )
    floor = rows[0].floor
    most = max(speeds)
    if floor is not None:
        least = (rows[0].made[-1] if by_tokens else rows[0].requests) / floor.seconds
        most = max(most, least)
        axes.axvline(least, color=_FLOOR, linestyle="--")
        axes.annotate(
            f"floor {least:,.0f} ", (least, 0), xycoords=("data", "axes fraction"), xytext=(0, 4),
            textcoords="offset points", ha="right", va="bottom", color=_FLOOR,
        )  # fmt: skip
    axes.set_xlim(0, 1.12 * most)
    axes.set_xlabel("new tokens/s" if by_tokens else "prompts/s")
    _save(figure, path)


def plot_degrees(path: Path, sweep: DegreeSweep, title: str) -> None:
    degrees = [row.workload.degree for row in sweep.rows]  # type: ignore[union-attr]
    figure, axes = _axes(8, 4.5, title)
    if all(row.floor for row in sweep.rows):
        floors = [row.requests / row.floor.seconds for row in sweep.rows if row.floor]
        axes.plot(degrees, floors, color=_FLOOR, linestyle="--", marker=".", label="floor")
    axes.plot(degrees, [row.prompts_per_second for row in sweep.rows], color=_OURS, marker="o", label="hf_batchllm")
    if sweep.generate is not None and not sweep.generate.error:
        speed = sweep.generate.prompts_per_second
        axes.axhline(speed, color=_INK, linestyle=":", label=f"{sweep.generate.name} (shares nothing)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(degrees, [f"{degree:,}" for degree in degrees])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("prompts that share a prefix")
    axes.set_ylabel("prompts/s")
    axes.legend(frameon=False)
    _save(figure, path)


def _axes(width: float, height: float, title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # no window system is asked for

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    lines = [line for part in title.splitlines() for line in textwrap.wrap(part, _TITLE_WIDTH)]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=9, color=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
