"""The contents of the file that --json writes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..results.run_report import RunReport
from .ablation import Ablated, Ablation
from .floor import Floor
from .gpu_busy import GpuBusy
from .measuring import Measurement, Reads
from .model_alone import ModelAlone
from .parameter_sweeps import DegreeSweep, SyncCell, SyncSweep
from .workload import Mix, Workload


def machine_figures(model: PreTrainedModel, name: str, machine: str) -> dict[str, Any]:
    return {
        "model": name,
        "dtype": str(model.dtype),
        "machine": machine,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def floor_figures(floor: Floor) -> dict[str, Any]:
    return {
        "seconds": floor.seconds,
        "products_seconds": floor.products,
        "kv_seconds": floor.keys,
        "weights_seconds": floor.weights,
        "decode_steps_alone": floor.alone,
        "elementwise_seconds": floor.elementwise,
        "operations_per_second": floor.rates.operations,
        "copy_bytes_per_second": floor.rates.copy,
        "experts": floor.experts,
        "routed_tokens": floor.routed_tokens,
        **asdict(floor.needs),
    }


def degrees_figures(sweep: DegreeSweep) -> dict[str, Any]:
    return {
        "degrees": [
            {
                "workload": row.workload.as_dict(),
                **row.as_dict(),
                "floor": floor_figures(row.floor) if row.floor else None,
            }
            for row in sweep.rows
        ],
        "generate": sweep.generate.as_dict() if sweep.generate else None,
        "generate_prompts_per_second_by_batch_size": sweep.tried,
    }


def sync_figures(sweep: SyncSweep) -> dict[str, Any]:
    def cells(of: list[SyncCell]) -> list[dict[str, Any]]:
        return [
            {"steps_per_sync": count, "idle_tokens": cell.idle_tokens, **cell.row.as_dict()}
            for count, cell in zip(sweep.steps, of, strict=False)
        ]

    return {
        "workload": sweep.with_graphs[0].row.workload.as_dict(),
        "with_graphs": cells(sweep.with_graphs),
        "without_graphs": cells(sweep.without),
        "new_tokens_without_graphs": sweep.off_new,
    }


def ablation_figures(ablation: Ablation) -> dict[str, Any]:
    def figures(ablated: Ablated) -> dict[str, Any]:
        found = {**ablated.row.as_dict(), "what": ablated.variant.instead} if not ablated.why_not else {}
        found |= {"off": None if ablated is ablation.rows[0] else ablated.variant.name, "label": ablated.variant.label}
        if ablated.why_not:
            return {**found, "nothing_to_turn_off": ablated.why_not}
        report = ablated.report
        if ablated.row.error or report is None:
            return found
        return found | {
            "times_slower": ablation.times_slower(ablated),
            "computed_tokens": report.computed_tokens,
            "recomputed_tokens": report.recomputed_tokens,
            "steps": report.steps,
            "preemptions": report.preemptions,
            "most_running": ablated.most_running,
            "peak_kv_bytes": report.peak_memory,
            "kv_bytes": report.kv_memory,
            "same_tokens_as_all_on": ablated.same_tokens,
        }

    floor = ablation.rows[0].row.floor
    return {
        "workload": ablation.rows[0].row.workload.as_dict(),
        "ablation": [figures(ablated) for ablated in ablation.rows],
        "rounds": ablation.rounds,
        "floor": floor_figures(floor) if floor else None,
    }


def contenders_figures(
    workload: Workload | Mix,
    rows: list[Measurement],
    report: RunReport,
    alone: ModelAlone | None,
    same: tuple[int, int] | None,
    tried: dict[int, float],
    reads: Reads | None,
    busy: GpuBusy | None,
) -> dict[str, Any]:
    floor = rows[0].floor
    return {
        "workload": workload.as_dict(),
        "contenders": [row.as_dict() for row in rows],
        "pieces": asdict(alone) if alone else None,
        "floor": floor_figures(floor) if floor else None,
        "decode_reads_bytes_per_second": reads.bytes_per_second if reads else None,
        "gpu_busy_share": busy.share if busy else None,
        "same_tokens": same,
        "generate_prompts_per_second_by_batch_size": tried,
        "computed_tokens": report.computed_tokens,
        "prompt_tokens": report.prompt_tokens,
        "idle_tokens": report.idle_tokens,
        "steps": report.steps,
    }
