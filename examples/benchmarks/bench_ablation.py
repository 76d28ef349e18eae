"""What each part of the engine brings: the same prompts several times, each time with one part turned off.

    python examples/benchmarks/bench_ablation.py --config llama-8b --requests 400 --shared 2000 --own 200 --new 100
    python examples/benchmarks/bench_ablation.py --parts order admission --max-running 8 --set kv_memory=3MB
    python examples/benchmarks/bench_ablation.py --vary steps_per_sync=1,4,16 --degree 1 --shared 0 --new 512

The engine does not know about this: a part is turned off by a field of BatchConfig, by a scheduler that does less, or
by a method that is replaced for the length of a run. Runs take turns, one of each in a round, so that a drifting clock
affects all alike; sharing, which takes several times as long, runs in the first round only. Medians are shown.

    computed, again   prompt tokens; tokens computed again after memory ran short
    running           the most sequences at once
    idle              tokens run for answers that had ended (with --stop-after answers end at random)
    same              prompts that got the same tokens as in the first row
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import common
from other_schedulers import AtMost, InListOrder, PrefixesFirst

from hf_batchllm.bench.__main__ import floor_for, setting
from hf_batchllm.bench.contenders import Measurement, Ours, machine_name
from hf_batchllm.bench.workload import Workload, words_of
from hf_batchllm.engine.wiring import scheduler_for
from hf_batchllm.model.attention.torch_attention import CascadePlan
from hf_batchllm.model.attention.triton_attention import StepWork, TritonBackend
from hf_batchllm.model.batch import AttentionBatch
from hf_batchllm.planning.scheduler import GroupScheduler

ALL_ON = "nothing"


@contextmanager
def without_cascade() -> Iterator[None]:
    """Each decode row reads all of its page table by itself.

    Chunks of prompts still read together what they share, except short chunks on a GPU, which run like decode rows.
    """
    work_of, divide = TritonBackend.work_of, CascadePlan._divide

    def alone_in_lists(self: TritonBackend, batch: AttentionBatch) -> StepWork:
        work = work_of(self, batch)
        work.gates = math.inf, math.inf  # no prefix is long enough for a range of its own
        return work

    def alone_in_torch(self: CascadePlan) -> Any:
        shared, alone = divide(self)
        for begin, end in [span for span in shared if span[1] <= self.batch.rows]:
            pieces = shared.pop((begin, end))
            for row in range(begin, end):
                alone[row] += pieces
        for pieces in alone:
            pieces.sort(key=lambda piece: piece[1])
        return shared, alone

    TritonBackend.work_of = alone_in_lists  # type: ignore[method-assign]
    CascadePlan._divide = alone_in_torch  # type: ignore[method-assign]
    try:
        yield
    finally:
        TritonBackend.work_of, CascadePlan._divide = work_of, divide  # type: ignore[method-assign]


@dataclass
class Variant:
    """The engine with one part turned off, and its runs."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)  # of BatchConfig
    scheduler: Callable[[int], GroupScheduler] | None = None  # takes gather_rows
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # entered for a run
    rounds: int = 1 << 30  # in which it runs

    def why_not(self, device: str, fields: dict[str, Any]) -> str:
        """Why this part cannot be turned off here; empty if it can."""
        backend = fields.get("backend", "torch" if device == "cpu" else "triton")
        if "fuse" in self.fields and backend == "torch":
            return "without the Triton kernels the model's own layers run anyway"
        if {"cuda_graphs", "steps_per_sync"} & set(self.fields) and device == "cpu":
            return "without a GPU there are neither CUDA graphs nor steps launched ahead"
        return ""


def variants(max_running: int = 256) -> dict[str, Variant]:
    return {
        "sharing": Variant("sharing: each prompt is computed whole", {"share_prefixes": False}, rounds=1),
        "cascade": Variant("cascade: each row reads by itself", around=without_cascade),
        "same-step": Variant("same step: readers wait for a prefix", scheduler=PrefixesFirst),
        "graphs": Variant("graphs: kernel by kernel", {"cuda_graphs": False}),
        "run-ahead": Variant("run-ahead: the host waits each step", {"steps_per_sync": 1}),
        "patches": Variant("patches: the model's own layers", {"fuse": False}),
        "order": Variant("order: let in as listed", scheduler=InListOrder),
        "admission": Variant(f"admission: {max_running:,} at once", scheduler=partial(AtMost, most=max_running)),
    }


def contender(model: Any, variant: Variant, fields: dict[str, Any]) -> Ours:
    fields = fields | variant.fields
    if variant.scheduler is not None:
        usual = scheduler_for("groups", model.device)
        assert isinstance(usual, GroupScheduler)
        fields["scheduler"] = variant.scheduler(usual.gather_rows)
    return Ours(model, fields)


def ablate(
    model: Any, workload: Workload, some: Sequence[Variant], fields: dict[str, Any], rounds: int
) -> list[tuple[Measurement, Any]]:
    """The runs of each variant, and the report of its last one. The first variant must not fail."""
    prompts, answers, cuda = workload.prompts(words_of(model)), workload.answers, model.device.type == "cuda"
    ours = [contender(model, variant, fields) for variant in some]
    rows = [Measurement(variant.name, workload) for variant in some]
    few, new = (32, 32) if cuda else (2, 2)
    for nth in range(-1, rounds):  # the first warms up: kernels for prefixes are compiled, graphs captured
        for variant, run, row in zip(some, ours, rows, strict=True):
            if row.error or nth >= variant.rounds:
                continue
            try:
                with variant.around():
                    if nth >= 0:
                        row.time(model, partial(run, prompts, answers))
                        continue
                    # The first variant runs all prompts, so that kernels for steps of full size do not count for it.
                    whole = cuda and row is rows[0]
                    part = prompts if whole else workload.first(few).prompts(words_of(model))
                    run(part, [min(new, each) for each in answers[: len(part)]])
            except Exception as error:  # out of memory, for example: the other variants stand
                if row is rows[0]:
                    raise
                row.fail(error)
    return [(row, run.report) for row, run in zip(rows, ours, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    every = variants()
    flags: common.Flags = {
        "--parts": {"nargs": "*", "default": [*every], "choices": every, "help": "that are turned off"},
        "--vary": {"metavar": "NAME=VALUE,...", "help": "values of a field of BatchConfig, in place of parts"},
        "--set": {"action": "append", "default": [], "type": setting, "metavar": "NAME=VALUE", "help": "for all rows"},
        "--stop-after": {"type": int, "metavar": "N", "help": "one token in N ends an answer, and --new is the most"},
        **common.FLOOR,
    }
    numbers = common.RFC | {"runs": (1, "rounds"), "max_running": (256, "for the row admission")}
    asked = common.read(__doc__, arguments, flags, model="", figures=True, **numbers)
    every, fields = variants(asked.max_running), dict(asked.set)
    some = [Variant(ALL_ON), *(every[name] for name in every if name in asked.parts)]
    if asked.vary:
        name, _, values = asked.vary.partition("=")
        some = [Variant(f"{name}={value}", dict([setting(f"{name}={value}")])) for value in values.split(",")]
    if twice := {name for variant in some for name in variant.fields} & set(fields):
        raise SystemExit(f"--set {', '.join(twice)} is what a row varies: leave out one of them")
    model = common.model_of(asked)
    if asked.stop_after:
        common.end_at_random(model, asked.stop_after)
    workload = common.workload_of(asked)
    here = [variant for variant in some if asked.vary or not variant.why_not(asked.device, fields)]
    found = ablate(model, workload, here, fields, asked.runs)
    floor, why_no_floor = floor_for(model, found[0][0]) if asked.floor and not asked.stop_after else (None, "")
    print(f"\n{workload}. {why_no_floor}")
    columns = {"off": "<39", "seconds": "8.2f", "prompts/s": "9.2f", "tokens/s": "8,.0f", "slower": "6.2f"}
    columns |= {"of floor": "8.0%", "computed": "9,", "again": "7,", "steps": "6,", "running": "7,", "idle": "6,"}
    table, first = common.Table({**columns, "same": "5,"}), found[0][0]
    for row, report in found:
        if row.error:
            table.add({"off": row.name, "error": row.error})
            print(f"  {row.error[:100]}")
            continue
        row.floor = floor(workload) if floor else None
        same = sum(mine == theirs for mine, theirs in zip(row.tokens, first.tokens, strict=True))
        figures = {"off": row.name, "seconds": row.seconds, "prompts/s": row.prompts_per_second, "same": same}
        figures |= {"tokens/s": row.new_tokens_per_second, "slower": row.seconds / first.seconds}
        figures |= {"of floor": row.share_of_floor, "computed": report.computed_tokens, "steps": report.steps}
        figures |= {"again": report.recomputed_tokens, "idle": report.idle_tokens}
        table.add(figures, running=int(report.timeline.running.max()), runs=row.runs)
    for variant in some:
        if variant not in here:
            print(f"{variant.name:<39} {variant.why_not(asked.device, fields)}")
    runs = [row.runs for row, _ in found if len(row.runs) > 1]
    if runs:
        spread = max(max(each) / min(each) - 1 for each in runs)
        print(f"Medians of {asked.runs} rounds. Runs of the same thing differ by up to {spread:.1%}.")
    shown = {"model": asked.model or asked.config, "machine": machine_name(model.device), "work": str(workload)}
    table.write(asked.json, **shown, rates=str(found[0][0].floor.rates) if found[0][0].floor else None)


if __name__ == "__main__":
    main()
