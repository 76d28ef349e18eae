"""The report of a call that is over, or was interrupted."""

from __future__ import annotations

from collections.abc import Sequence

from ..inputs.seeds import Seeds, without_numbers
from ..planning.lineup import Lineup
from ..planning.paged_cache import PagedCache
from ..planning.requests_and_prefixes import Request
from ..planning.state_slots import StateSlots
from ..results.run_report import RunReport
from ..results.sharing_plan import SharingPlan
from ..wording import counted, shown_size
from .drafts.drafts import Drafts
from .loop import Engine
from .timekeeper import Timekeeper


def report_of(
    engine: Engine,
    drafts: Drafts | None,
    cache: PagedCache,
    lineup: Lineup,
    requests: Sequence[Request],
    plan: SharingPlan,
    timekeeper: Timekeeper,
    *,
    preemptions: int,
    kv_bytes: tuple[int, int],
    page_bytes: int,
    planning_seconds: float,
    capture_seconds: float,
    device_memory: int,
    seed: Seeds | None,
    fused: str,
    graphs: str,
    slot_bytes: int,
    images: str,
) -> RunReport:
    lengths = sum(request.prompt_tokens for request in requests)
    seconds = timekeeper.seconds
    recomputed = cache.lost_tokens - cache.still_lost(request for request in lineup.requests if not request.done)
    collector = engine.collector
    recomputed += collector.recomputed
    # A failed step brought no tokens, but its share of recomputed tokens was counted: hence no less than 0.
    computed = max(0, engine.model_tokens - collector.idle_tokens - recomputed - collector.decoded)
    # The plan's figure for an interrupted call; the actual figure where requests ran without their prefixes.
    needed = max(computed, plan.computed_tokens - lineup.cached_tokens)
    return RunReport(
        sequences=len(requests),
        finished=sum(request.done for request in requests),
        prompt_tokens=lengths,
        computed_tokens=computed,
        saving=1 - needed / lengths if lengths else 0.0,
        recomputed_tokens=recomputed,
        cached_tokens=lineup.cached_tokens,
        new_tokens=sum(len(request.generated) for request in requests),
        model_tokens=engine.model_tokens,
        steps=engine.steps,
        preemptions=preemptions,
        seconds=seconds,
        planning_seconds=planning_seconds,
        peak_memory=kv_bytes[0],
        kv_memory=kv_bytes[1],
        seed=without_numbers(seed),
        plan=plan,
        fused=fused,
        graphs=graphs,
        states=_of_states(cache.slots, slot_bytes, engine.builder.states_handed_on),
        images=images,
        drafted_tokens=0 if drafts is None else drafts.drafted,
        accepted_tokens=0 if drafts is None else drafts.accepted,
        draft_seconds=0.0 if drafts is None else drafts.saved_seconds,
        idle_tokens=collector.idle_tokens,
        device_memory=device_memory,
        timeline=timekeeper.timeline(seconds, page_bytes, capture_seconds),
    )


def _of_states(slots: StateSlots | None, slot_bytes: int, handed_on: int) -> str:
    if slots is None:
        return ""
    begun = f", {counted(handed_on, 'run')} of tokens began with that of a prefix or a prompt" if handed_on else ""
    return f"{slots.most:,} at most, of {slots.count:,} that there was room for, {shown_size(slot_bytes)} each{begun}"
