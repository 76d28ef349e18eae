"""What is said of a call: a bar while it runs, and the report of one that is over, or was interrupted."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ..inputs.seeds import without_numbers
from ..planning.state_slots import StateSlots
from ..results.run_report import RunReport
from ..wording import counted, shown_size
from .call import Call, Stage
from .cost import StepCosts, cost_of_head
from .progress import Progress, progress_bar


def progress_of(call: Call, wanted: bool | None) -> AbstractContextManager[Progress]:
    """A bar over what ``call.run`` will do."""
    use, plan, answers, counts = call.use, call.plan, call.answers, call.outputs.counts
    to_compute = plan.sharing.computed_tokens - call.lineup.cached_tokens
    lengths = sum(each.prompt_tokens for each in answers) if counts is None else counts.prompt_tokens
    on_gpu = use.device.type == "cuda"
    return progress_bar(
        answers,
        to_compute,
        1 - to_compute / max(lengths, 1),
        wanted,
        lambda: StepCosts(on_gpu, cost_of_head(use.model, use.architecture.vocab_size)),
        rows=len(answers) * min(1.0, call.memory.cache.num_pages / max(plan.pages_at_once, 1)),
        scores=None if counts is None else counts.scores,
    )


def report_of(call: Call) -> RunReport | None:
    """None if the call broke off before there was anything to report."""
    if call.stage < Stage.RUNNING:
        return None
    engine, cache, lineup, kv, requests = call.engine, call.memory.cache, call.lineup, call.resources.kv, call.answers
    collector, launcher, images = engine.collector, engine.launcher, call.memory.images
    lengths, seconds = sum(request.prompt_tokens for request in requests), call.timekeeper.seconds
    recomputed = cache.lost_tokens - cache.still_lost(request for request in lineup.requests if not request.done)
    recomputed += collector.recomputed
    # A failed step brought no tokens, but its share of recomputed tokens was counted: hence no less than 0.
    computed = max(0, engine.model_tokens - collector.idle_tokens - recomputed - collector.decoded)
    # The plan's figure for an interrupted call; the actual figure where requests ran without their prefixes.
    needed = max(computed, call.plan.sharing.computed_tokens - lineup.cached_tokens)
    drafted, accepted, saved_seconds = collector.drafted
    report = RunReport(
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
        preemptions=engine.preemptions,
        seconds=seconds,
        planning_seconds=call.planning_seconds,
        peak_memory=kv.peak_bytes,
        kv_memory=kv.whole_bytes,
        seed=without_numbers(call.job.seed),
        plan=call.plan.sharing,
        fused=call.use.fused_summary,
        graphs=launcher.summary,
        states=_of_states(cache.slots, kv.architecture.slot_bytes, engine.builder.states_handed_on),
        images="" if images is None else images.summary,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        draft_seconds=saved_seconds,
        idle_tokens=collector.idle_tokens,
        device_memory=kv.memory.highest(),
        timeline=call.timekeeper.timeline(seconds, kv.page_bytes, launcher.capture_seconds),
    )
    return call.outputs.in_report(report, lineup.requests)


def _of_states(slots: StateSlots | None, slot_bytes: int, handed_on: int) -> str:
    if slots is None:
        return ""
    begun = f", {counted(handed_on, 'run')} of tokens began with that of a prefix or a prompt" if handed_on else ""
    return f"{slots.most:,} at most, of {slots.count:,} that there was room for, {shown_size(slot_bytes)} each{begun}"
