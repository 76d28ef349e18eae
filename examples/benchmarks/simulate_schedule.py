"""Which schedule is faster, without a GPU: the engine's own plan, scheduler and cache on a simulated GPU.

    python examples/benchmarks/simulate_schedule.py                                            every case, a minute
    python examples/benchmarks/simulate_schedule.py --cases rfc                                cases with this name
    python examples/benchmarks/simulate_schedule.py --cases "mixed, known, short" --plot steps.svg

It prints how long a run would take on an H200 with a model of Llama-8B's shape, its share of the floor, and the number
of preemptions: with the default scheduler (groups), with static admission, and with the plain scheduler (fifo). The
picture shows the tokens of each step over time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import common
import numpy as np
import torch
from other_schedulers import StaticAdmission
from plot import draw_steps
from simulated_gpu import H200, LLAMA_8B, SimulatedGpu

from hf_batchllm.bench.floor import Floor, floor_of
from hf_batchllm.bench.workload import Workload
from hf_batchllm.engine.collector import TokenCollector
from hf_batchllm.engine.loop import Engine
from hf_batchllm.engine.smaller_steps import SmallerSteps
from hf_batchllm.engine.timekeeper import Timekeeper
from hf_batchllm.inputs.prompts import Prompt
from hf_batchllm.notices import Notices
from hf_batchllm.planning.base_scheduler import BaseScheduler
from hf_batchllm.planning.lineup import line_up
from hf_batchllm.planning.paged_cache import PagedCache
from hf_batchllm.planning.scheduler import FifoScheduler, GroupScheduler
from hf_batchllm.planning.sharing import plan_sharing
from hf_batchllm.planning.step import Step
from hf_batchllm.results.timeline import Timeline
from hf_batchllm.sampling.stop_rules import StopRules
from hf_batchllm.sampling.stopping import Endings

_PAGE, _VOCABULARY, _STOP = 64, 32_000, 0
_BUDGET = 8192  # tokens in a step, as engine/step_size.py has it for a model of this size


@dataclass(frozen=True)
class Case:
    """A list of prompts, the memory for it, and whether the lengths of answers are known."""

    name: str
    workload: Workload
    memory: float  # bytes of KV cache
    known: bool = True  # if not, each answer may become as long as the longest


@dataclass
class Outcome:
    seconds: float
    floor: Floor
    preemptions: int
    timeline: Timeline

    @property
    def share(self) -> float:
        return self.floor.seconds / self.seconds


class _NoBuilder:
    """Builds nothing: the simulated GPU reads the step itself."""

    page_size = _PAGE

    def build(self, step: Step) -> Step:
        return step


def simulate(case: Case, scheduler: BaseScheduler, budget: int = _BUDGET) -> Outcome:
    answers = case.workload.answers
    prompts = [Prompt(np.array(ids, np.int32)) for ids in case.workload.prompts(_VOCABULARY)]
    limits = answers if case.known else [case.workload.new] * len(answers)
    plan = plan_sharing(prompts, new_tokens=limits)
    cache = PagedCache(int(case.memory // (LLAMA_8B.kv_bytes * _PAGE)), _PAGE)
    lineup = line_up(prompts, plan, limits, cache, can_stop=[not case.known] * len(prompts))
    if lineup.too_long:
        raise ValueError(f"{case.name}: {len(lineup.too_long)} prompts do not fit into {case.memory / 1e9:.0f} GB")
    gpu = SimulatedGpu(answers, _STOP)
    rules = StopRules(stop_tokens=frozenset() if case.known else frozenset([_STOP]))
    endings = Endings(lineup.requests, [rules] * len(prompts), 0.0, torch.device("cpu"))
    timekeeper = Timekeeper(clock=gpu.clock, ahead=True)
    smaller = SmallerSteps(scheduler, torch.device("cpu"), _PAGE, Notices())
    depth = 2 * gpu.most_times
    collector = TokenCollector(lineup.requests, scheduler, endings, timekeeper)
    engine = Engine(scheduler, _NoBuilder(), gpu, collector, depth, timekeeper, smaller)  # type: ignore[arg-type]
    timekeeper.start(cache)
    scheduler.start(lineup.requests, cache, budget)
    for _ in engine.run():
        pass
    for request, length in zip(lineup.requests, answers, strict=True):
        assert len(request.generated) == length, f"{request} has {len(request.generated)} of {length} tokens"
    cache.check_integrity([])
    floor = floor_of(LLAMA_8B, case.workload.groups, H200)
    return Outcome(
        gpu.busy_until,
        floor,
        scheduler.preemptions,
        timekeeper.timeline(gpu.busy_until, LLAMA_8B.kv_bytes * _PAGE),
    )


def cases() -> list[Case]:
    """Lists of equal and of mixed lengths; with memory for the whole list, for a third or half, or for a tenth."""
    rfc = Workload(requests=800, shared=2000, own=200, new=100, degree=16)
    mixed = Workload(requests=400, shared=2000, own=200, new=2048, degree=8, kind="mixed")
    alone = replace(mixed, shared=500, degree=1)
    chats = Workload(requests=256, shared=0, own=2048, new=2048, degree=1, kind="sharegpt")
    plenty, short = 100e9, 10e9
    found = [
        Case(f"rfc, degree {degree}", replace(rfc, degree=degree, requests=count), plenty)
        for degree, count in ((1, 200), (4, 400), (16, 800), (64, 832))
    ]
    found += [
        Case("rfc, degree 16, short", rfc, short),
        Case("decode, 256 rows", Workload(256, 0, 128, 512, 1), plenty),
        Case("sharegpt", chats, plenty),
    ]
    for known in (True, False):
        word = "known" if known else "unknown"
        for memory, much in ((plenty, "plenty"), (short, "short")):
            found += [
                Case(f"mixed, {word}, {much}", mixed, memory, known),
                Case(f"mixed alone, {word}, {much}", alone, memory, known),
                Case(f"sharegpt 512, {word}, {much}", replace(chats, requests=512), memory, known),
            ]
        found += [
            Case(f"mixed 800, {word}, a tenth", replace(mixed, requests=800), 7e9, known),
            Case(f"mixed alone 800, {word}, a tenth", replace(alone, requests=800), 7e9, known),
            Case(f"sharegpt 1024, {word}, a tenth", replace(chats, requests=1024), 4e9, known),
        ]
    return found


SCHEDULERS: dict[str, Callable[[], BaseScheduler]] = {
    "groups": GroupScheduler,
    "static": StaticAdmission,
    "fifo": FifoScheduler,
}


def main(arguments: Sequence[str] | None = None) -> None:
    flags: common.Flags = {
        "--cases": {"default": "", "help": "only those whose names contain this"},
        "--schedulers": {"nargs": "+", "choices": SCHEDULERS, "default": [*SCHEDULERS]},
        "--plot": {"type": Path, "metavar": "FILE", "help": "draw one case into this .svg, .png or .pdf"},
    }
    asked = common.read(__doc__, arguments, flags, on="host", budget=(_BUDGET, "tokens in a step"))
    chosen = [case for case in cases() if asked.cases in case.name]
    if not chosen or (asked.plot is not None and len(chosen) > 1):
        raise SystemExit(f"--cases: {asked.cases!r} is in the names of {len(chosen)}; --plot draws one")
    print("Simulated: Llama-8B's shape on an H200. Seconds, share of the floor, preemptions\n")
    columns = {"": "<32"}
    for name in asked.schedulers:
        columns |= {name: "9.2f", f"{name} share": f"{len(name) + 6}.1%", f"{name} preempted": f"{len(name) + 10},"}
    table = common.Table(columns)
    for case in chosen:
        outcomes = {name: simulate(case, SCHEDULERS[name](), asked.budget) for name in asked.schedulers}
        row: dict[str, object] = {"": case.name}
        for name, each in outcomes.items():
            row |= {name: each.seconds, f"{name} share": each.share, f"{name} preempted": each.preemptions}
        table.add(row)
    if asked.plot is not None:
        title = f"Simulated: {chosen[0].name}, {chosen[0].memory / 1e9:.0f} GB. {chosen[0].workload}"
        draw_steps({name: outcome.timeline for name, outcome in outcomes.items()}, asked.plot, title)


if __name__ == "__main__":
    main()
