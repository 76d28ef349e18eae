"""Where a GPU's time goes in a run: by kind of kernel, by part of the run, and the gaps in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

# The kind of a kernel, by a piece of its name; the first match counts. cuBLAS has many names for its kernels.
KINDS = {
    "attention of prompts": ("_attend_chunks",),
    "attention of answers": ("_attend_items", "_merge_parts"),
    "norms, rope, activations": ("_add_rms_norm", "_rope_and_write", "_act_and_mul", "rms_norm"),
    "picking tokens": (
        "_best_of", "_noisy_weight", "_draw_from", "_advance", "_survey", "_search", "_cut", "_penalise", "_mark_seen",
        "_edge", "_list_groups",
    ),
    "experts": ("_up_products", "_down_products", "_sum_of_shares", "_rows_of_experts", "_choose", "_cut_tiles"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "splitk", "gemv"),
    "copies": ("memcpy", "memset"),
}  # fmt: skip
OTHER = "other kernels"
GAPS = {"idle, under 10 us at a time": 1e-5, "idle, under 1 ms": 1e-3, "idle, longer": float("inf")}
PARTS = ("with prompts", "answers alone")
_GAPS_LISTED = 12  # the longest


class BusySpan(NamedTuple):
    name: str
    start: int  # ns
    end: int


@dataclass(frozen=True)
class Gap:
    at: float  # seconds since the first kernel
    seconds: float
    before: str  # the kernels on either side
    after: str


@dataclass
class DeviceTime:
    """Seconds of each kind and part; gaps are kinds, too. Where kernels overlap, the time counts for the earliest."""

    total: float
    seconds: dict[str, list[float]]  # kind -> one value for each of PARTS
    gaps: list[Gap] = field(default_factory=list)  # the longest, in order of time
    kernels: int = 0

    @property
    def parts(self) -> list[float]:
        return [sum(column) for column in zip(*self.seconds.values(), strict=True)]

    def figures(self) -> dict[str, object]:
        return {
            "seconds": self.total,
            "kernels": self.kernels,
            "parts": list(PARTS),
            "kinds": self.seconds,
            "longest_gaps": [vars(gap) for gap in self.gaps],
        }


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, pieces in KINDS.items() if any(piece in lower for piece in pieces)), OTHER)


def device_time(device: torch.device, run: Callable[[], object]) -> DeviceTime | None:
    """None if the device cannot be profiled."""
    return time_of(spans_of(device, run))


def spans_of(device: torch.device, run: Callable[[], object]) -> list[BusySpan]:
    if device.type != "cuda" or torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize(device)
    results = getattr(profile.profiler, "kineto_results", None)
    return [
        BusySpan(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in ([] if results is None else results.events())  # torch's own list of them takes minutes to make
        if event.device_type().name == "CUDA" and not event.name().startswith("ProfilerStep")
    ]


def time_of(spans: Sequence[BusySpan]) -> DeviceTime | None:
    if not spans:
        return None
    spans = sorted(spans, key=lambda span: span.start)
    first, last = spans[0].start, max(span.end for span in spans)
    kinds = {name: kind_of(name) for name in {span.name for span in spans}}
    prompts = [span.end for span in spans if kinds[span.name] == "attention of prompts"]
    # The part with prompts ends with the last attention of prompts: the rest of that step counts as decode.
    border = max(prompts, default=first)
    seconds = {kind: [0.0, 0.0] for kind in (*KINDS, OTHER, *GAPS)}
    gaps: list[Gap] = []
    until, before = first, ""
    for span in spans:
        part = int(span.start >= border)
        if span.start > until:
            idle = (span.start - until) / 1e9
            seconds[next(name for name, least in GAPS.items() if idle < least)][part] += idle
            gaps.append(Gap((until - first) / 1e9, idle, _short(before), _short(span.name)))
        if span.end > until:
            seconds[kinds[span.name]][part] += (span.end - max(span.start, until)) / 1e9
            until, before = span.end, span.name
    longest = sorted(gaps, key=lambda gap: -gap.seconds)[:_GAPS_LISTED]
    return DeviceTime((last - first) / 1e9, seconds, sorted(longest, key=lambda gap: gap.at), len(spans))


def _short(name: str) -> str:
    return name.split("(")[0].split("<")[0].removeprefix("void ").rsplit("::", 1)[-1][:40]


def device_time_table(found: DeviceTime) -> str:
    """A table: seconds and shares of each part."""
    whole = sum(found.parts)
    head = f"{'':<30}{'all':>14}" + "".join(f"{part:>20}" for part in PARTS)
    lines = [f"where the GPU's time goes, {found.total:.2f} s and {found.kernels:,} kernels, under a profiler:", head]
    for kind, columns in found.seconds.items():
        if sum(columns) < 0.0005 * whole:
            continue
        cells = zip([sum(columns), *columns], [whole, *found.parts], [14, 20, 20], strict=True)
        lines.append(f"  {kind:<28}" + "".join(_cell(value, of, width) for value, of, width in cells))
    lines.append(f"  {'seconds':<28}" + "".join(_cell(value, 0.0, width) for value, width in _sums(found)))
    if found.gaps:
        lines.append("longest gaps:")
        lines += [
            f"  {1000 * gap.seconds:>7.2f} ms at {gap.at:>7.3f} s, after {gap.before}, before {gap.after}"
            for gap in found.gaps
        ]
    return "\n".join(lines)


def _sums(found: DeviceTime) -> list[tuple[float, int]]:
    return list(zip([sum(found.parts), *found.parts], [14, 20, 20], strict=True))


def _cell(value: float, of: float, width: int) -> str:
    share = f"{100 * value / of:5.1f} %" if of else ""
    return f"{value:>{width - 8}.3f}{share:>8}"
