"""The same measurement for several values of one parameter: the degree of sharing, or ``steps_per_sync``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from .contenders import Generate, Ours, best_batch_size
from .measuring import Floors, Measurement, is_greedy, measure
from .workload import Mix, Workload

_RIVAL_BATCHES = 2  # of generate at its best batch size, unless --rival-requests says otherwise


@dataclass
class DegreeSweep:
    rows: list[Measurement]  # one for each workload
    generate: Measurement | None
    tried: dict[int, float]  # batch size -> generate's prompts/s
    note: str = ""  # why there is no floor


def sweep_degrees(
    model: PreTrainedModel,
    fields: dict[str, Any],
    workloads: Sequence[Workload],
    *,
    runs: int,
    floor: bool,
    batch_sizes: list[int] | None,
    rival_requests: int | None,
    rival_runs: int,
) -> DegreeSweep:
    """``generate`` is measured once, on the largest workload: it shares nothing, so degrees are alike to it."""
    vocabulary = model.config.get_text_config().vocab_size
    rows = []
    for workload in workloads:
        ours = Ours(model, fields, name=f"degree {workload.degree}, {workload.requests:,} prompts")
        rows.append(measure(ours, workload, workload.prompts(vocabulary), runs))
    note = ""
    if floor:
        floors = Floors(model, max(rows, key=lambda row: row.requests))
        note = floors.reason
        for row in rows:
            row.floor = floors.of(row.workload)
    theirs: Measurement | None = None
    tried: dict[int, float] = {}
    if batch_sizes:
        largest = max(workloads, key=lambda workload: workload.requests)
        prompts = largest.prompts(vocabulary)
        best, tried = best_batch_size(model, prompts, largest.answers, batch_sizes)
        part = largest.first(rival_requests or _RIVAL_BATCHES * best)
        name = f"model.generate, batch {best}"
        theirs = measure(Generate(model, best, name), part, part.prompts(vocabulary), rival_runs)
    return DegreeSweep(rows, theirs, tried, note)


@dataclass
class SyncCell:
    row: Measurement
    idle_tokens: int  # tokens run for answers that had ended


@dataclass
class SyncSweep:
    steps: Sequence[int]
    with_graphs: list[SyncCell]
    without: list[SyncCell]  # empty on a CPU, which has no graphs
    off_new: int  # new tokens of the runs without graphs
    drawn: bool  # whether tokens are drawn, so that answers end at random


def sweep_steps_per_sync(
    model: PreTrainedModel,
    fields: dict[str, Any],
    workload: Workload | Mix,
    steps: Sequence[int],
    *,
    runs: int,
    off_new: int | None,
) -> SyncSweep:
    vocabulary = model.config.get_text_config().vocab_size
    prompts = workload.prompts(vocabulary)
    shorter = workload.cut_short(off_new) if off_new else workload

    def cell(count: int, graphs: bool) -> SyncCell:
        name = f"steps_per_sync {count}" + ("" if graphs else ", no graphs")
        ours = Ours(model, {**fields, "steps_per_sync": count, "cuda_graphs": graphs}, name=name)
        row = measure(ours, workload if graphs else shorter, prompts, runs)
        assert ours.report is not None
        return SyncCell(row, ours.report.idle_tokens)

    with_graphs = [cell(count, True) for count in steps]
    without = [cell(count, False) for count in steps] if model.device.type == "cuda" else []
    drawn = not is_greedy(model)
    return SyncSweep(steps, with_graphs, without, min(off_new or workload.new, workload.new), drawn)
