"""What each part of the engine brings: the same prompts again and again, each time with one thing off.

Nothing here is known to the engine. Things are off by a field of BatchConfig, by a scheduler that does less, or for the
length of a run by a method that is put back afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from ..engine.wiring import scheduler_for
from ..model.batch import AttentionBatch
from ..model.torch_attention import CascadePlan
from ..model.triton_attention import StepWork, TritonBackend
from ..planning.memory_forecast import Forecast
from ..planning.paged_cache import PagedCache
from ..planning.scheduler import GroupScheduler
from ..planning.step import Chunk, Step
from ..planning.units import Prefix, Request
from ..results.run_report import RunReport
from .contenders import Ours, timed
from .measuring import BRIEF_WARM_UP, WARM_UP, Floors, Row
from .workload import Workload

NAMES = ("sharing", "cascade", "same-step", "graphs", "run-ahead", "patches", "order", "admission")
ALL_ON = "all on"
MAX_RUNNING = 256  # what engines take for `max_num_seqs`, as a rule


class PrefixesFirst(GroupScheduler):
    """No unit enters the step in which a prefix below it is being computed: it waits for the one after."""

    def _fill(self, request: Request, step: Step, budget: int) -> int:
        # Whoever waits does so beside a chunk of this very step, so no step comes out empty because of it.
        fresh = {chunk.unit for chunk in step.chunks}
        used = 0
        for unit, end in [*request.ancestors(), (request, request.length)]:
            count = min(end - unit.computed, budget - used)
            if count > 0:
                step.chunks.append(Chunk(unit, unit.computed, unit.computed + count))
                unit.computed += count
                used += count
            if count > 0 or unit.computed < end or unit in fresh:
                break
        return used


class InListOrder(GroupScheduler):
    """Requests are let in as the list has them. Decode rows stand in the order of the plan still, and share as ever.

    Groups come back to a prefix after others. So where memory is short one that nobody reads just now goes for the next
    request, as in engines that know of no plan; else it would lie there until all of its readers have come.
    """

    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        super().start(requests, cache, max_batch_tokens)
        below = [unit for request in requests for unit, _ in request.ancestors()]
        self._prefixes = [unit for unit in dict.fromkeys(below) if isinstance(unit, Prefix)]

    def _ordered(self, requests: Sequence[Request]) -> Iterable[Request]:
        return sorted(requests, key=lambda request: (request.index, request.sample))

    def _fits(self, request: Request, forecast: Forecast) -> bool:
        if not self.running:
            return super()._fits(request, forecast)
        # A prefix does not go with those who run: others come back to it.
        needed = self.cache.missing_with_ancestors(request, request.max_length) + forecast.most_new_pages
        if self._could_have(needed) and self.cache.evict(needed):
            return True
        chain = [unit for unit, _ in request.ancestors() if isinstance(unit, Prefix)]
        for prefix in chain:  # what the newcomer reads stays
            prefix.running += 1
        try:
            idle = sum(len(prefix.pages) for prefix in self._prefixes if prefix.running == 0)
            return needed <= self.cache.free_pages + idle and self.cache.evict_idle(needed)
        finally:
            for prefix in chain:
                prefix.running -= 1

    def next(self) -> Step | None:
        step = super().next()
        if step is not None:
            step.rows.sort(key=lambda request: request.rank)
        return step


class AtMost(GroupScheduler):
    """So many requests run at a time, however much memory there is."""

    def __init__(self, gather_rows: int = 0, most: int = MAX_RUNNING) -> None:
        super().__init__(gather_rows)
        self.most = most

    def _fits(self, request: Request, forecast: Forecast) -> bool:
        return len(self.running) < self.most and super()._fits(request, forecast)


@contextmanager
def without_cascade() -> Iterator[None]:
    """Each decode row reads all of its own page table. What chunks of prompts share they still read together, but for
    those of a few tokens on a GPU, which are run as decode rows are."""
    work_of, divide = TritonBackend.work_of, CascadePlan._divide

    def alone_in_lists(self: TritonBackend, batch: AttentionBatch) -> StepWork:
        work = work_of(self, batch)
        work.gates = math.inf, math.inf  # no prefix saves so much that it gets a range of its own
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


@dataclass(frozen=True)
class Variant:
    """One thing off."""

    name: str
    what: str = ""  # is done instead
    fields: dict[str, Any] = field(default_factory=dict)  # of BatchConfig
    scheduler: Callable[[int], GroupScheduler] = GroupScheduler  # takes gather_rows
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # a run
    once: bool = False  # takes several times as long as the others, so one run must do

    @property
    def label(self) -> str:
        return f"{self.name}: {self.what}" if self.what else self.name

    def contender(self, model: PreTrainedModel, fields: dict[str, Any]) -> Ours:
        usual = scheduler_for("groups", model.device)
        assert isinstance(usual, GroupScheduler)
        scheduler = self.scheduler(usual.gather_rows)
        return Ours(model, {**fields, **self.fields, "scheduler": scheduler}, name=self.name)

    def why_not(self, device: torch.device, fields: dict[str, Any]) -> str:
        """Why there is nothing to turn off; empty if there is something."""
        by_torch = fields.get("backend") == "torch"
        if self.name in ("graphs", "run-ahead") and device.type != "cuda":
            what = "CUDA graphs" if self.name == "graphs" else "steps launched ahead"
            return f"without a GPU there are no {what}"
        if self.name == "graphs" and by_torch:
            return 'with backend="torch" there are no CUDA graphs'
        if self.name == "patches" and (by_torch or (device.type != "cuda" and fields.get("backend") != "triton")):
            return "without the Triton kernels layers are as the model has them"
        return ""


def variants_of(names: Sequence[str], max_running: int = MAX_RUNNING) -> list[Variant]:
    """Those of ``names``, in the order of NAMES; first the one that has all on."""
    there = [
        Variant("sharing", "each prompt computed whole", {"share_prefixes": False}, once=True),
        Variant("cascade", "each row reads for itself", around=without_cascade),
        Variant("same-step", "readers wait for a prefix", scheduler=PrefixesFirst),
        Variant("graphs", "kernel by kernel", {"cuda_graphs": False}),
        Variant("run-ahead", "the host waits each step", {"steps_per_sync": 1}),
        Variant("patches", "layers as the model has", {"fuse": False}),
        Variant("order", "let in as listed", scheduler=InListOrder),
        Variant("admission", f"at most {max_running:,} at once", scheduler=lambda rows: AtMost(rows, max_running)),
    ]
    assert tuple(variant.name for variant in there) == NAMES
    return [Variant(ALL_ON), *(variant for variant in there if variant.name in names)]


@dataclass
class Ablated:
    """A variant, measured."""

    variant: Variant
    row: Row
    report: RunReport | None = None  # of the last run
    most_running: int = 0  # sequences at once
    same_tokens: int | None = None  # prompts that got the same tokens as with all on
    why_not: str = ""


@dataclass
class Ablation:
    rows: list[Ablated]  # the first has all on
    rounds: int
    note: str = ""  # why there is no floor

    def times_slower(self, ablated: Ablated) -> float:
        return ablated.row.seconds / self.rows[0].row.seconds

    @property
    def spread(self) -> float | None:
        """By what share the slowest run of a variant differs from its fastest, at most; None from single runs."""
        runs = [ablated.row.runs for ablated in self.rows if len(ablated.row.runs) > 1]
        return max((max(some) / min(some) - 1 for some in runs), default=None)


def ablate(
    model: PreTrainedModel,
    fields: dict[str, Any],
    workload: Workload,
    variants: Sequence[Variant],
    *,
    runs: int,
    floor: bool,
) -> Ablation:
    """In rounds, one run of each variant in each: a clock that drifts does so for all of them."""
    prompts = workload.prompts(model.config.get_text_config().vocab_size)
    rows = [
        Ablated(variant, Row(variant.name, workload), why_not=variant.why_not(model.device, fields))
        for variant in variants
    ]
    contenders = {ablated.variant.name: ablated.variant.contender(model, fields) for ablated in rows}
    _warm_up(rows, contenders, workload)
    for nth in range(runs):
        print(f"round {nth + 1} of {runs}:", end=" ", flush=True)
        for ablated in rows:
            if ablated.why_not or ablated.row.error or (ablated.variant.once and nth):
                continue
            ours, row = contenders[ablated.variant.name], ablated.row
            try:
                with ablated.variant.around():
                    seconds, row.tokens = timed(model.device, lambda ours=ours: ours.run(prompts, workload.answers))
            except Exception as error:  # out of memory, say: the others stand
                _failed(ablated, error)
                continue
            row.runs.append(seconds)
            row.made.append(sum(map(len, row.tokens)))
            ablated.report, ablated.most_running = ours.report, ours.scheduler.most_running
            print(f"{ablated.variant.name} {seconds:.2f} s", end=", " if ablated is not rows[-1] else "", flush=True)
        print(flush=True)
    result = Ablation(rows, runs)
    for ablated in rows:
        if ablated.row.runs:
            pairs = zip(ablated.row.tokens, rows[0].row.tokens, strict=True)
            ablated.same_tokens = sum(mine == theirs for mine, theirs in pairs)
    if floor:
        floors = Floors(model)
        result.note = floors.reason
        least = floors.of(workload)
        for ablated in rows:
            ablated.row.floor = least
    return result


def _warm_up(rows: Sequence[Ablated], contenders: dict[str, Ours], workload: Workload) -> None:
    """Each variant on a few groups, which is what compiles the kernels for prefixes, too.

    On a GPU all on, which is measured first, has all prompts: steps of full size come with kernels of their own, and it
    is not to load them for the others.
    """
    model = contenders[ALL_ON].model
    few, new = WARM_UP.get(model.device.type, BRIEF_WARM_UP)
    for ablated in rows:
        if ablated.why_not:
            continue
        whole = ablated.variant.name == ALL_ON and model.device.type == "cuda"
        part = (workload if whole else workload.first(few)).cut_short(new)
        prompts = part.prompts(model.config.get_text_config().vocab_size)
        try:
            with ablated.variant.around():
                contenders[ablated.variant.name].run(prompts, part.answers)
        except Exception as error:
            _failed(ablated, error)


def _failed(ablated: Ablated, error: Exception) -> None:
    if ablated.variant.name == ALL_ON:  # there would be nothing to stand beside
        raise error
    ablated.row.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    print(f"{ablated.variant.name} failed: {ablated.row.error[:80]}")
