"""RunReport: how a call went, in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..wording import counted, shown_size
from .sharing_plan import SharingPlan, plan_body
from .timeline import Timeline, phases_bar, timeline_panels
from .views.html import caption, cells, folded, percent, seconds, table, text, tiles, view


@dataclass(frozen=True)
class WorkerReport:
    """What one process of a GeneratorPool, or one rank, did in a call.

    pieces: parts of the list of which it ran something. read_tokens, new_tokens: that it ran over, and generated.
    busy: the share of the call's time in which it had work. sending_seconds: of that, while the work and its results
        were on their way. lost: how it ended, if it did not come to the end.
    """

    device: str
    pieces: int
    read_tokens: int
    new_tokens: int
    busy: float
    lost: str = ""
    sending_seconds: float = 0.0


@dataclass(frozen=True)
class RunReport:
    """How a call went.

    sequences, finished: all of them, and those that had ended (fewer only after an interrupt).
    prompt_tokens: tokens of all prompts (each counted once for every sample).
    computed_tokens: prompt tokens that the model ran over, without those that it ran over again.
    recomputed_tokens: tokens that the model ran over again after a preemption.
    saving: the share of the prompts' tokens that sharing spares, from 0 to 1; after an interrupt, that of the plan.
    cached_tokens: prompt tokens found in prefixes kept from an earlier call.
    new_tokens: tokens generated.
    planning_seconds: until the plan was made, with the checks of prompts, and the loading of a tokenizer, before it.
        ``timeline.phases`` has each by itself.
    model_tokens: all tokens that went through the model.
    peak_memory: the most bytes of KV cache that held tokens at the same time.
    kv_memory: bytes of the whole KV cache, which is as large as the call can use, or as memory allows.
    device_memory: the most bytes of the device that PyTorch had given out at the same time: the model, the KV cache,
        what steps take, and whatever else the process has there. 0 on a CPU, where PyTorch does not count. To measure
        it, a call resets PyTorch's peaks (``torch.cuda.reset_peak_memory_stats``).
    seed: the seed of the sampling noise, or a list with one for each prompt; None for greedy decoding.
    fused: which layers ran on fused kernels, or why none did; empty where there are no such kernels.
    graphs: decode steps replayed as CUDA graphs, and what capturing them took; empty if there were none.
    states: of a model whose layers carry a state from token to token, how many were kept at the same time, and how many
        sequences began with that of a prefix; empty for other models. Their bytes count as KV cache.
    images: how many images the vision tower has read, and in how many runs; empty where no prompt shows any.
    idle_tokens: tokens run for answers that had already ended.
    drafted_tokens: tokens that were guessed and run (``prompt_lookup_num_tokens``).
    accepted_tokens: those of them that were right, so that a step was saved for their answer.
    draft_seconds: about how many seconds guesses saved, by what steps took in this call with guesses and without.
        Negative where guesses cost more than they brought. In a pool, the sum of all processes.
    scored_tokens: in a call of ``score``, the tokens whose log-probability was asked for. Its sequences are the
        continuations, each with its context; all of their tokens but the last count as prompt tokens.
    timeline: what the steps ran over as time went by, and where the time went (a Timeline); None in a pool.
    workers: of a GeneratorPool, what each process did. Its memory is the sum over all of them; ``device_memory`` is the
        most on one device.
    parted_tokens: tokens of prefixes that several processes computed, beyond the first time.
    """

    sequences: int
    finished: int
    prompt_tokens: int
    computed_tokens: int
    saving: float
    recomputed_tokens: int
    cached_tokens: int
    new_tokens: int
    model_tokens: int
    steps: int
    preemptions: int
    seconds: float
    planning_seconds: float
    peak_memory: int
    kv_memory: int
    seed: int | Sequence[int] | None
    plan: SharingPlan = field(repr=False)
    fused: str = ""
    graphs: str = ""
    states: str = ""
    images: str = ""
    idle_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_seconds: float = 0.0
    device_memory: int = 0
    scored_tokens: int = 0
    timeline: Timeline | None = field(default=None, repr=False)
    workers: tuple[WorkerReport, ...] = ()
    parted_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second; in a call of ``score``, scored tokens per second."""
        return (self.scored_tokens or self.new_tokens) / self.seconds if self.seconds else 0.0

    def _counted(self) -> tuple[str, int, str]:
        """What the call was asked for, and how many tokens of which kind it made."""
        thing, made = ("score", self.scored_tokens) if self.scored_tokens else ("sequence", self.new_tokens)
        return thing, made, "scored" if self.scored_tokens else "new"

    def _facts(self) -> Iterator[tuple[str, str]]:
        """The lines of the text below the first; empty ones are left out."""
        yield (
            "prompts",
            f"{self.prompt_tokens:,} tokens, {self.computed_tokens:,} computed ({self.saving:.1%} "
            f"{saved(self, ' of the whole call')})",
        )
        yield "shared", self.plan.why_nothing
        yield "model", f"{self.model_tokens:,} tokens in {counted(self.steps, 'step')}"
        if self.workers:
            sending = max(worker.sending_seconds for worker in self.workers)
            yield "time", f"{self.planning_seconds:.2f} s of planning, {sending:.2f} s of sending"
        yield "time", self.timeline.longest_phases if self.timeline is not None else ""
        used, memory = shown_size(self.peak_memory), shown_size(self.kv_memory)
        yield "KV cache", f"{used} used at most, of {memory} that this call could use"
        for number, worker in enumerate(self.workers):
            what = f"{worker.read_tokens:,} prompt tokens, {worker.new_tokens:,} new ones"
            said = f"{worker.device}: {what} in {counted(worker.pieces, 'piece')}, busy {worker.busy:.0%}"
            yield "" if number else "processes", f"{said}{f', {worker.lost}' if worker.lost else ''}"
        if self.parted_tokens:
            yield "parted", f"{self.parted_tokens:,} tokens of prefixes were computed in several processes"
        if self.scored_tokens:
            yield "scores", f"read from {len(self.plan.order):,} sequences that were run"
        if self.device_memory:
            yield "memory", f"{shown_size(self.device_memory)} at most on the device, all in all"
        if self.cached_tokens:
            yield "kept", f"{self.cached_tokens:,} prompt tokens came from an earlier call"
        if self.preemptions:
            yield "preempted", f"{self.preemptions:,} times, {self.recomputed_tokens:,} tokens computed again"
        yield from (("fused", self.fused), ("graphs", self.graphs), ("states", self.states), ("images", self.images))
        if self.drafted_tokens:
            right = f"{self.accepted_tokens:,} of them right ({self.accepted_tokens / self.drafted_tokens:.0%})"
            took = f"{abs(self.draft_seconds):.{0 if abs(self.draft_seconds) >= 10 else 2}f}"
            gain = f": about {took} s {'saved' if self.draft_seconds > 0 else 'lost'}" if float(took) else ""
            yield "drafts", f"{self.drafted_tokens:,} tokens were guessed, {right}{gain}"
        if self.idle_tokens:
            yield "idle", f"{self.idle_tokens:,} tokens were run for answers that had ended"
        if self.seed is not None:
            yield "seed", str(self.seed) if isinstance(self.seed, int) else "one for each prompt"

    def __str__(self) -> str:
        took = f"{self.seconds:,.2f} s" if self.seconds < 100 else f"{self.seconds:,.0f} s"
        thing, made, kind = self._counted()
        count = counted(self.sequences, thing)
        if self.finished < self.sequences:
            count = f"interrupted: {self.finished:,} of {count}"
        first = f"{count}, {made:,} {kind} tokens in {took} ({self.tokens_per_second:,.0f} {kind} tokens/s)"
        return "\n".join([first, *(f"{name:11}{fact}" for name, fact in self._facts() if fact)])

    def _repr_html_(self) -> str:
        thing, made, kind = self._counted()
        ended = f"{self.finished:,} of {self.sequences:,}" if self.finished < self.sequences else f"{self.finished:,}"
        figures = [
            (ended, thing if self.sequences == 1 else f"{thing}s"),
            (f"{made:,}", f"{kind} tokens"),
            (seconds(self.seconds), "in all"),
            (f"{self.tokens_per_second:,.0f}", f"{kind} tokens / s"),
            (percent(self.saving), f"of prompt tokens {saved(self)}"),
        ]
        body = interrupted(self) + tiles(figures)
        if self.timeline is not None:
            body += timeline_panels(self.timeline, self.kv_memory) + phases_bar(self.timeline.phases)
        drawn = ("time",)  # a picture shows it better
        facts = ((name, fact) for name, fact in self._facts() if fact and name not in drawn)
        rows = (cells(("hfb-fact", text(name)), ("", text(fact))) for name, fact in facts)
        return view("How the run went", f"{body}{table('hfb-narrow', '', rows)}{self._shared()}", str(self))

    def _shared(self) -> str:
        """What the prompts share, folded."""
        if not self.scored_tokens:
            title = f"What the prompts share: {percent(self.plan.saving)} of their tokens"
            return folded(title, plan_body(self.plan, "sequence"))
        # Reading many scores from few sequences spares more than these share: their share is not the saving.
        read = f"The scores were read from {counted(len(self.plan.order), 'sequence')}"
        if not self.plan.segments:
            return caption(f"{read}, which share nothing more.")
        return folded(f"{read}: what these share besides", plan_body(self.plan, "sequence"))


def saved(report: RunReport, of: str = "") -> str:
    """An interrupted call has not come to all that is saved."""
    return "saved" if report.finished == report.sequences else f"saved by the plan{of}"


def interrupted(report: RunReport, and_so: str = "") -> str:
    """A warning, with ``and_so`` at its end; empty for a run that went to its end."""
    if report.finished >= report.sequences:
        return ""
    warning = f"Interrupted: {report.finished:,} of {counted(report.sequences, 'sequence')} had finished{and_so}"
    return f'<div class="hfb-title hfb-warn">{text(warning)}</div>'
