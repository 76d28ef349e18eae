"""Where a GPU's time goes in a run: by kind of kernel, by part of the run, and the gaps in between.

    python examples/benchmarks/bench_profile.py --config llama-8b --requests 800 --shared 2000 --own 200 --new 100
    python examples/benchmarks/bench_profile.py --config llama-8b --requests 256 --shared 0 --own 128 --new 200

One run after two that warm up, under a profiler, which slows it down by a few percent. Where kernels overlap, the time
counts for the earliest. The part with prompts ends with the last attention of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import common
import torch

from hf_batchllm.bench.contenders import Ours
from hf_batchllm.bench.floor import free_memory
from hf_batchllm.bench.workload import words_of

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


class Span(NamedTuple):
    """A time in which the device was busy with a kernel, in ns."""

    name: str
    start: int
    end: int


@dataclass
class DeviceTime:
    seconds: dict[str, list[float]]  # kind -> one value for each of PARTS; gaps are kinds, too
    gaps: list[tuple[float, float, str, str]] = field(default_factory=list)  # at, seconds, kernels on either side
    kernels: int = 0

    @property
    def parts(self) -> list[float]:
        return [sum(column) for column in zip(*self.seconds.values(), strict=True)]

    @property
    def busy(self) -> list[float]:
        """The share of each part in which the device had work."""
        idle = [sum(self.seconds[kind][part] for kind in GAPS) for part in range(len(PARTS))]
        return [1 - gap / whole if whole else 0.0 for gap, whole in zip(idle, self.parts, strict=True)]


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, pieces in KINDS.items() if any(piece in lower for piece in pieces)), OTHER)


def time_of(spans: Sequence[Span]) -> DeviceTime:
    spans = sorted(spans, key=lambda span: span.start)
    prompts = [span.end for span in spans if kind_of(span.name) == "attention of prompts"]
    first = until = spans[0].start
    border, before = max(prompts, default=first), ""
    found = DeviceTime({kind: [0.0, 0.0] for kind in (*KINDS, OTHER, *GAPS)}, kernels=len(spans))
    for span in spans:
        part = int(span.start >= border)
        if span.start > until:
            idle = (span.start - until) / 1e9
            found.seconds[next(name for name, least in GAPS.items() if idle < least)][part] += idle
            found.gaps.append(((until - first) / 1e9, idle, _short(before), _short(span.name)))
        if span.end > until:
            found.seconds[kind_of(span.name)][part] += (span.end - max(span.start, until)) / 1e9
            until, before = span.end, span.name
    return found


def _short(name: str) -> str:
    return name.split("(")[0].split("<")[0].removeprefix("void ").rsplit("::", 1)[-1][:40]


def main(arguments: Sequence[str] | None = None) -> None:
    asked = common.read(__doc__, arguments, on="gpu", model="", figures=True, **common.RFC)
    model, workload = common.model_of(asked), common.workload_of(asked)
    prompts, answers, ours = workload.prompts(words_of(model)), workload.answers, Ours(model)
    for lengths in ([min(2, each) for each in answers], answers):
        ours(prompts, lengths)
    free_memory(model.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ours(prompts, answers)
        torch.cuda.synchronize()
    events = profile.profiler.kineto_results.events()  # torch's own list of them takes minutes to make
    found = time_of([
        Span(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type().name == "CUDA" and not event.name().startswith("ProfilerStep")
    ])  # fmt: skip
    whole = sum(found.parts)
    print(f"\n{workload}\n{whole:.2f} s and {found.kernels:,} kernels, under a profiler")
    table = common.Table({"": "<28", "all": "8.3f", "share": "6.1%", **dict.fromkeys(PARTS, "13.3f")})
    for kind, (of_prompts, of_answers) in found.seconds.items():
        if of_prompts + of_answers >= 0.0005 * whole:
            both, named = of_prompts + of_answers, dict(zip(PARTS, (of_prompts, of_answers), strict=True))
            table.add({"": kind, "all": both, "share": both / whole, **named})
    table.add({"": "seconds", "all": whole, "share": 1.0, **dict(zip(PARTS, found.parts, strict=True))})
    print(f"GPU busy {found.busy[0]:.1%} of the part with prompts, {found.busy[1]:.1%} where answers grow alone")
    longest = sorted(sorted(found.gaps, key=lambda gap: -gap[1])[:12])
    for at, seconds, before, after in longest:
        print(f"  a gap of {1000 * seconds:>7.2f} ms at {at:>7.3f} s, after {before}, before {after}")
    print(ours.report)
    table.write(asked.json, workload=str(workload), busy=found.busy, kernels=found.kernels, gaps=longest)


if __name__ == "__main__":
    main()
