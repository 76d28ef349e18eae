"""Pictures of the figures that --json writes: prompts/s over degrees, and with one part off. Needs matplotlib.

python examples/benchmarks/plot.py degrees.json degrees.svg     of hf_batchllm.bench with several degrees
python examples/benchmarks/plot.py ablation.json ablation.svg   of bench_ablation.py
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common  # noqa: F401  before hf_batchllm: finds the checkout
import numpy as np

from hf_batchllm.results.timeline import Timeline

_OURS, _OTHERS, _FLOOR, _INK = "#2a6fbb", "#b4bcc6", "#c0392b", "#333333"


def draw(figures: Mapping[str, Any], path: Path) -> None:
    rows = [row for row in figures["contenders" if "contenders" in figures else "rows"] if row.get("seconds")]
    draw_rows = _degrees if "contenders" in figures else _one_off
    figure = draw_rows(rows)
    _save(figure, path, f"{figures['model']}, {figures['machine']}", figures["work"])


def _degrees(rows: list[dict[str, Any]]) -> Any:
    figure, (axes,) = _axes(8, 4.5)
    ours = [row for row in rows if row["name"].startswith("hf_batchllm")]
    degrees = [row["workload"]["degree"] for row in ours]
    if all(row["floor"] for row in ours):
        floors = [row["requests"] / row["floor"]["seconds"] for row in ours]
        axes.plot(degrees, floors, color=_FLOOR, linestyle="--", marker=".", label="floor")
    axes.plot(degrees, [row["prompts_per_second"] for row in ours], color=_OURS, marker="o", label="hf_batchllm")
    for row in rows:
        if row["name"].startswith("model.generate"):
            label = f"{row['name']} (shares nothing)"
            axes.axhline(row["prompts_per_second"], color=_INK, linestyle=":", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(degrees, [f"{degree:,}" for degree in degrees])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("prompts that share a prefix")
    axes.set_ylabel("prompts/s")
    axes.legend(frameon=False)
    return figure


def _one_off(rows: list[dict[str, Any]]) -> Any:
    """A bar for each variant with one part off, below one with all on."""
    figure, (axes,) = _axes(8, 1.6 + 0.45 * len(rows))
    speeds = [row["prompts/s"] for row in rows]
    labels = [f"{speed:.3g}" + (f"  ({row['slower']:.2f} x)" if nth else "") for nth, (speed, row) in
              enumerate(zip(speeds, rows, strict=True))]  # fmt: skip
    bars = axes.barh([row["off"] for row in rows], speeds, color=[_OURS] + [_OTHERS] * (len(rows) - 1))
    axes.bar_label(bars, labels, padding=4, color=_INK)
    axes.invert_yaxis()
    if rows[0].get("of floor"):
        axes.axvline(speeds[0] / rows[0]["of floor"], color=_FLOOR, linestyle="--", label="floor")
        axes.legend(frameon=False)
    axes.set_xlim(right=1.25 * max(speeds))
    axes.set_xlabel("prompts/s")
    axes.set_ylabel("what is off")
    return figure


def draw_steps(runs: Mapping[str, Timeline], path: Path, title: str) -> None:
    """The tokens of each step over time, one run below the other.

    The axis is logarithmic: a step with prompts has thousands of tokens, one without a few hundred.
    """
    figure, rows = _axes(9, 1 + 2.2 * len(runs), len(runs))
    for axes, (name, timeline) in zip(rows, runs.items(), strict=True):
        steps = np.maximum(timeline.steps, 1)
        decode, prompts = timeline.decode_tokens / steps, timeline.prompt_tokens / steps
        edges = np.concatenate([[timeline.begin], timeline.ends]) - timeline.begin
        axes.stairs(decode, edges, fill=True, color=_OURS, label="decode rows of a step")
        axes.stairs(decode + prompts, edges, baseline=decode, fill=True, color=_OTHERS, label="tokens of prompts")
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8)
        axes.set_title(f"{name}: {timeline.ends[-1] - timeline.begin:,.1f} s", loc="left", fontsize=9, color=_INK)
    rows[0].legend(frameon=False, fontsize=8, loc="upper right")
    rows[-1].set_xlabel("seconds since the first step")
    _save(figure, path, title)


def _axes(width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # not pyplot, which may open a window

    figure = Figure(figsize=(width, height), layout="constrained")
    every = figure.subplots(rows, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, every


def _save(figure: Any, path: Path, *title: str) -> None:
    lines = [line for part in title for line in textwrap.wrap(part, 110)]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=9, color=_INK)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
