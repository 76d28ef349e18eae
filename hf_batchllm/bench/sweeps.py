"""Tables over one thing that is varied: how many prompts share a prefix, how many steps run at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from .contenders import Generate, Ours, best_batch_size
from .measuring import Floors, Row, is_greedy, measure
from .workload import Mix, Workload

_BATCHES = 2  # of generate at its best batch size, where nothing else is asked for


@dataclass
class DegreeSweep:
    rows: list[Row]  # one for each workload
    generate: Row | None
    tried: dict[int, float]  # generate's prompts/s by batch size
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
    """``generate`` is measured once, on the last workload: it shares nothing, so no degree changes what it does."""
    vocabulary = model.config.get_text_config().vocab_size
    rows = []
    for workload in workloads:
        ours = Ours(model, fields, name=f"degree {workload.degree}, {workload.requests:,} prompts")
        rows.append(measure(ours, workload, workload.prompts(vocabulary), runs))
    note = ""
    if floor:
        floors = Floors(model)
        note = floors.reason
        for row in rows:
            row.floor = floors.of(row.workload)
    theirs, tried = None, {}
    if batch_sizes:
        largest = max(workloads, key=lambda workload: workload.requests)
        prompts = largest.prompts(vocabulary)
        best, tried = best_batch_size(model, prompts, largest.answers, batch_sizes)
        part = largest.first(rival_requests or _BATCHES * best)
        name = f"model.generate, batch {best}"
        theirs = measure(Generate(model, best, name), part, part.prompts(vocabulary), rival_runs)
    return DegreeSweep(rows, theirs, tried, note)


@dataclass
class SyncCell:
    row: Row
    idle_tokens: int  # run for answers that had ended


@dataclass
class SyncSweep:
    steps: Sequence[int]
    with_graphs: list[SyncCell]
    without: list[SyncCell]  # empty where there are no graphs to do without
    off_new: int
    drawn: bool  # answers end where the noise has it


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
