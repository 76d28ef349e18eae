"""Schedules without a GPU: the engine's own plan, scheduler and cache, driven by arithmetic instead of a model.

    python examples/benchmarks/simulate_schedule.py --workload mixed --memory 16e9
    python examples/benchmarks/simulate_schedule.py --workload mixed --unknown --plot steps.svg
    python examples/benchmarks/simulate_schedule.py --all

It prints how long a run would take on an H200 with a model of Llama-8B's shape, what share of the floor that is, and
how often requests gave their pages back; the picture shows the tokens of each step over time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from simulated_gpu import H200, LLAMA_8B, SimulatedGpu

from hf_batchllm.bench.floor import Floor, floor_of
from hf_batchllm.bench.workload import Mix, MixedGroups, Workload
from hf_batchllm.cache import PagedCache
from hf_batchllm.endings import Endings, Rules
from hf_batchllm.engine import Engine
from hf_batchllm.lineup import line_up
from hf_batchllm.prompts import Prompt
from hf_batchllm.recorder import Recorder
from hf_batchllm.request import Step
from hf_batchllm.scheduler import Scheduler
from hf_batchllm.sharing import plan_sharing

_PAGE, _VOCABULARY, _STOP = 64, 32_000, 0
_BUDGET = 8192  # tokens in a step, as pace.py has it


@dataclass(frozen=True)
class Case:
    """A list, and what is known of it."""

    name: str
    workload: Workload | Mix
    memory: float  # bytes of KV cache
    known: bool = True  # whether the lengths of answers are; else all may become as long as the longest


@dataclass
class Outcome:
    seconds: float
    floor: Floor
    preemptions: int
    lost_tokens: int
    idle_tokens: int
    steps: list[tuple[float, int, int]]
    host: float  # seconds that planning took here
    device_idle: float
    peak: float

    @property
    def share(self) -> float:
        return self.floor.seconds / self.seconds


class _NoBuilder:
    """The launcher looks at the step itself."""

    page_size = _PAGE

    def build(self, step: Step) -> Step:
        return step


def simulate(case: Case, scheduler: Scheduler, budget: int = _BUDGET, plan_of: Any = plan_sharing) -> Outcome:
    answers = case.workload.answers
    prompts = [Prompt(np.array(ids, np.int32)) for ids in case.workload.prompts(_VOCABULARY)]
    limits = answers if case.known else [case.workload.new] * len(answers)
    plan = plan_of(prompts, new_tokens=limits)
    cache = PagedCache(int(case.memory // (LLAMA_8B.kv_bytes * _PAGE)), _PAGE)
    lineup = line_up(prompts, plan, limits, cache, can_stop=not case.known)
    if lineup.too_long:
        raise ValueError(f"{case.name}: {len(lineup.too_long)} prompts do not fit into {case.memory / 1e9:.0f} GB")
    gpu = SimulatedGpu(answers, _STOP)
    rules = Rules(stop_tokens=frozenset() if case.known else frozenset([_STOP]))
    endings = Endings(lineup.requests, [rules] * len(prompts), 0.0, torch.device("cpu"))
    recorder = Recorder(clock=gpu.clock, ahead=True)
    engine = Engine(scheduler, _NoBuilder(), gpu, endings, 2 * gpu.most_times, recorder)  # type: ignore[arg-type]
    recorder.start(cache)
    scheduler.start(lineup.requests, cache, budget)
    began = time.perf_counter()
    for _ in engine.run():
        pass
    took = time.perf_counter() - began
    for request, length in zip(lineup.requests, answers, strict=True):
        assert len(request.generated) == length, f"{request} has {len(request.generated)} of {length} tokens"
    cache.check_integrity([])
    floor = floor_of(LLAMA_8B, case.workload.as_groups(), H200)
    return Outcome(
        gpu.busy_until,
        floor,
        scheduler.preemptions,
        cache.lost_tokens,
        engine.idle_tokens,
        gpu.steps,
        took,
        gpu.idle,
        cache.peak_pages / cache.num_pages,
    )


def cases() -> list[Case]:
    """Plain lists that must not become slower, and mixed ones."""
    rfc = Workload(requests=800, shared=2000, own=200, new=100, degree=16)
    mixed = MixedGroups(requests=400)
    plenty, short = 100e9, 10e9
    found = [
        Case(f"rfc, degree {degree}", replace(rfc, degree=degree, requests=count), plenty)
        for degree, count in ((1, 200), (4, 400), (16, 800), (64, 832))
    ]
    found.append(Case("rfc, degree 16, short", rfc, short))
    found.append(Case("decode, 256 rows", Workload(256, 0, 128, 512, 1), plenty))
    found.append(Case("sharegpt", Mix(256), plenty))
    for known in (True, False):
        for memory in (plenty, short):
            what = f"{'known' if known else 'unknown'}, {'plenty' if memory == plenty else 'short'}"
            found.append(Case(f"mixed, {what}", mixed, memory, known))
            found.append(Case(f"mixed degree 1, {what}", replace(mixed, degree=1, shared=500), memory, known))
            found.append(Case(f"sharegpt 512, {what}", Mix(512), memory, known))
    return found
