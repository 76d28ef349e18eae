"""What each part of the engine brings: the same prompts several times, each time with one part turned off.

The engine does not know about this. A part is turned off by a field of BatchConfig, by a scheduler that does less, or
by a method that is replaced for the length of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ..engine.wiring import scheduler_for
from ..model.batch import AttentionBatch
from ..model.torch_attention import CascadePlan
from ..model.triton_attention import StepWork, TritonBackend
from ..planning.memory_forecast import Forecast
from ..planning.paged_cache import PagedCache
from ..planning.requests_and_prefixes import Prefix, Request
from ..planning.scheduler import GroupScheduler
from ..planning.step import Chunk, Step
from ..results.run_report import RunReport
from .contenders import Ours
from .measuring import BRIEF_WARM_UP, WARM_UP, Floors, Measurement
from .timing import timed
from .workload import Workload

NAMES = ("sharing", "cascade", "same-step", "graphs", "run-ahead", "patches", "order", "admission")
ALL_ON = "all on"
MAX_RUNNING = 256  # a usual default of engines for `max_num_seqs`


class PrefixesFirst(GroupScheduler):
    """A prompt waits for the step after the one that computes its prefix."""

    def _fill(self, request: Request, step: Step, budget: int) -> int:
        # A request waits only for a chunk of this very step, so no step is empty because of it.
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
    """Requests are admitted in the order of the list. Decode rows still stand in the order of the plan, and share.

    The readers of a prefix then do not follow each other. If memory is short, a prefix without a running reader makes
    room for the next request, as in engines without a plan; otherwise it would stay until its last reader has come.
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
        # A prefix does not end with its running readers: others still need it.
        needed = self.cache.missing_with_ancestors(request, request.max_length) + forecast.most_new_pages
        if self._could_have(needed) and self.cache.evict(needed):
            return True
        chain = [unit for unit, _ in request.ancestors() if isinstance(unit, Prefix)]
        for prefix in chain:  # the newcomer's own prefixes stay
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
    """At most ``most`` requests run at a time, however much memory there is."""

    def __init__(self, gather_rows: int = 0, most: int = MAX_RUNNING) -> None:
        super().__init__(gather_rows)
        self.most = most

    def _fits(self, request: Request, forecast: Forecast) -> bool:
        return len(self.running) < self.most and super()._fits(request, forecast)


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


@dataclass(frozen=True)
class Variant:
    """The engine with one part turned off."""

    name: str
    instead: str = ""  # what is done in its place
    fields: dict[str, Any] = field(default_factory=dict)  # of BatchConfig
    scheduler: Callable[[int], GroupScheduler] = GroupScheduler  # takes gather_rows
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # entered for a run
    once: bool = False  # measured in one run only, as it takes several times as long as the others

    @property
    def label(self) -> str:
        return f"{self.name}: {self.instead}" if self.instead else self.name

    def contender(self, model: PreTrainedModel, fields: dict[str, Any]) -> Ours:
        usual = scheduler_for("groups", model.device)
        assert isinstance(usual, GroupScheduler)
        scheduler = self.scheduler(usual.gather_rows)
        return Ours(model, {**fields, **self.fields, "scheduler": scheduler}, name=self.name)

    def why_not(self, device: torch.device, fields: dict[str, Any]) -> str:
        """Why this part cannot be turned off here; empty if it can."""
        by_torch = fields.get("backend") == "torch"
        if self.name in ("graphs", "run-ahead") and device.type != "cuda":
            part = "CUDA graphs" if self.name == "graphs" else "steps launched ahead"
            return f"without a GPU there are no {part}"
        if self.name == "graphs" and by_torch:
            return 'with backend="torch" there are no CUDA graphs'
        if self.name == "patches" and (by_torch or (device.type != "cuda" and fields.get("backend") != "triton")):
            return "without the Triton kernels the model's own layers run anyway"
        return ""


def variants_of(names: Sequence[str], max_running: int = MAX_RUNNING) -> list[Variant]:
    """The variants of ``names`` in the order of NAMES, after the one with all on."""
    variants = [
        Variant("sharing", "each prompt computed whole", {"share_prefixes": False}, once=True),
        Variant("cascade", "each row reads by itself", around=without_cascade),
        Variant("same-step", "readers wait for a prefix", scheduler=PrefixesFirst),
        Variant("graphs", "kernel by kernel", {"cuda_graphs": False}),
        Variant("run-ahead", "the host waits each step", {"steps_per_sync": 1}),
        Variant("patches", "the model's own layers", {"fuse": False}),
        Variant("order", "in the order of the list", scheduler=InListOrder),
        Variant("admission", f"at most {max_running:,} at once", scheduler=lambda rows: AtMost(rows, max_running)),
    ]
    assert tuple(variant.name for variant in variants) == NAMES
    return [Variant(ALL_ON), *(variant for variant in variants if variant.name in names)]


@dataclass
class Ablated:
    """The measurement of a variant."""

    variant: Variant
    row: Measurement
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
        """The largest share by which a variant's slowest run exceeds its fastest; None from single runs."""
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
    """In rounds with one run of each variant, so that a drifting clock affects all variants alike."""
    prompts = workload.prompts(model.config.get_text_config().vocab_size)
    rows = [
        Ablated(variant, Measurement(variant.name, workload), why_not=variant.why_not(model.device, fields))
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
                    seconds, row.tokens = timed(model.device, partial(ours.run, prompts, workload.answers))
            except Exception as error:  # out of memory, for example: the other variants stand
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
        floors = Floors(model, rows[0].row)
        result.note = floors.reason
        least = floors.of(workload)
        for ablated in rows:
            ablated.row.floor = least
    return result


def _warm_up(rows: Sequence[Ablated], contenders: dict[str, Ours], workload: Workload) -> None:
    """Runs each variant on a few groups, so that the kernels for prefixes are compiled, too.

    On a GPU the variant with all on, which is measured first, runs all prompts: steps of full size need their own
    kernels, and loading these must not count for the first variant alone.
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
    if ablated.variant.name == ALL_ON:  # nothing to compare the others with
        raise error
    ablated.row.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    print(f"{ablated.variant.name} failed: {ablated.row.error[:80]}")
