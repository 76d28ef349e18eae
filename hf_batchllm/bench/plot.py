"""The figures as a picture. Needs matplotlib (the extra `bench`).

python -m hf_batchllm.bench.plot FIGURES.json PICTURE.svg    draws a file written by --json, on any machine
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

PICTURES = (".svg", ".png", ".pdf")
_OURS, _RIVAL, _FLOOR, _INK = "#2a6fbb", "#b4bcc6", "#c0392b", "#333333"
_TITLE_WIDTH = 110


def plot(figures: dict[str, Any], path: Path) -> None:
    """``figures``: of one workload, of --degrees or of --ablation, as --json writes them."""
    if "contenders" in figures:
        figure = _contenders(figures)
    elif "degrees" in figures:
        figure = _degrees(figures)
    elif "ablation" in figures:
        figure = _ablation(figures)
    else:
        raise ValueError("only one workload, --degrees and --ablation can be drawn")
    dtype = figures["dtype"].removeprefix("torch.")
    title = [f"{figures['model']}, {dtype}, {figures['machine']}", figures["work"]]
    lines = [line for part in title for line in textwrap.wrap(part, _TITLE_WIDTH)]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=9, color=_INK)
    figure.savefig(path, dpi=150)


def _contenders(figures: dict[str, Any]) -> Any:
    """A bar for each contender, ours on top; the floor as a line."""
    rows = [row for row in figures["contenders"] if "error" not in row]
    # Prompts of different lengths: a rival that got only the first few is compared by tokens.
    unit = "new_tokens_per_second" if "ends_at" in figures["workload"] else "prompts_per_second"
    speeds = [row[unit] for row in rows]
    at_floor = speeds[0] / rows[0]["share_of_floor"] if figures["floor"] is not None else None
    return _bars([row["name"] for row in rows], speeds, [_short(speed) for speed in speeds], unit, at_floor)


def _ablation(figures: dict[str, Any]) -> Any:
    """A bar for each variant with one thing off, below one with everything on."""
    rows = [row for row in figures["ablation"] if "times_slower" in row]
    speeds = [row["prompts_per_second"] for row in rows]
    labels = [_short(speed) for speed in speeds]
    labels[1:] = [f"{speed}  ({row['times_slower']:.2f} x)" for speed, row in zip(labels[1:], rows[1:], strict=True)]
    at_floor = figures["workload"]["requests"] / figures["floor"]["seconds"] if figures["floor"] is not None else None
    figure = _bars([row["label"] for row in rows], speeds, labels, "prompts_per_second", at_floor)
    figure.axes[0].set_ylabel("what is off")
    figure.axes[0].set_xlim(0, 1.25 * max([at_floor or 0, *speeds]))
    return figure


def _bars(names: list[str], speeds: list[float], labels: list[str], unit: str, at_floor: float | None) -> Any:
    """The first bar is ours as it is. ``at_floor``: the speed at the floor."""
    figure, axes = _axes(8, 1.6 + 0.45 * len(names))
    bars = axes.barh(names, speeds, color=[_OURS] + [_RIVAL] * (len(names) - 1))
    axes.bar_label(bars, labels, padding=4, color=_INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    axes.invert_yaxis()
    most = max(speeds)
    if at_floor is not None:
        most = max(most, at_floor)
        axes.axvline(at_floor, color=_FLOOR, linestyle="--")
        where = {"xycoords": ("data", "axes fraction"), "xytext": (-4, 4), "textcoords": "offset points"}
        axes.annotate(f"floor {_short(at_floor)}", (at_floor, 0), ha="right", va="bottom", color=_FLOOR, **where)
    axes.set_xlim(0, 1.12 * most)
    axes.set_xlabel(unit.replace("_per_second", "/s").replace("_", " "))
    return figure


def _degrees(figures: dict[str, Any]) -> Any:
    rows = figures["degrees"]
    degrees = [row["workload"]["degree"] for row in rows]
    figure, axes = _axes(8, 4.5)
    if all(row["floor"] for row in rows):
        floors = [row["requests"] / row["floor"]["seconds"] for row in rows]
        axes.plot(degrees, floors, color=_FLOOR, linestyle="--", marker=".", label="floor")
    axes.plot(degrees, [row["prompts_per_second"] for row in rows], color=_OURS, marker="o", label="hf_batchllm")
    theirs = figures["generate"]
    if theirs is not None and "error" not in theirs:
        label = f"{theirs['name']} (shares nothing)"
        axes.axhline(theirs["prompts_per_second"], color=_INK, linestyle=":", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(degrees, [f"{degree:,}" for degree in degrees])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("prompts that share a prefix")
    axes.set_ylabel("prompts/s")
    axes.legend(frameon=False)
    return figure


def _axes(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # not pyplot, which may open a window

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _short(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or Path(arguments[1]).suffix not in PICTURES:
        print(f"python -m hf_batchllm.bench.plot FIGURES.json PICTURE ({', '.join(PICTURES)})", file=sys.stderr)
        return 2
    plot(json.loads(Path(arguments[0]).read_text()), Path(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
