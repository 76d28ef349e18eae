"""RunReport: how a call went, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..wording import counted, shown_size
from .sharing_plan import SharingPlan
from .timeline import Timeline


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

    @property
    def _saved_by_drafts(self) -> str:
        seconds = f"{abs(self.draft_seconds):.2f}" if abs(self.draft_seconds) < 10 else f"{self.draft_seconds:.0f}"
        return f": about {seconds} s {'saved' if self.draft_seconds > 0 else 'lost'}" if float(seconds) else ""

    def _repr_html_(self) -> str:
        from .views.report import report_html  # imported only when shown

        return report_html(self)

    def __str__(self) -> str:
        seconds = f"{self.seconds:,.2f} s" if self.seconds < 100 else f"{self.seconds:,.0f} s"
        thing = "score" if self.scored_tokens else "sequence"
        count = f"{self.sequences:,} {thing}{'' if self.sequences == 1 else 's'}"
        if self.finished < self.sequences:
            count = f"interrupted: {self.finished:,} of {count}"
        tokens, kind = (self.scored_tokens, "scored") if self.scored_tokens else (self.new_tokens, "new")
        saved = "saved" if self.finished == self.sequences else "saved by the plan of the whole call"
        lines = [
            f"{count}, {tokens:,} {kind} tokens in {seconds} ({self.tokens_per_second:,.0f} {kind} tokens/s)",
            f"prompts    {self.prompt_tokens:,} tokens, {self.computed_tokens:,} computed ({self.saving:.1%} {saved})",
            f"model      {self.model_tokens:,} tokens in {counted(self.steps, 'step')}",
            f"KV cache   {shown_size(self.peak_memory)} used at most, of {shown_size(self.kv_memory)} "
            "that this call could use",
        ]
        if self.timeline is not None and self.timeline.longest_phases:
            lines.insert(3, f"time       {self.timeline.longest_phases}")
        if self.workers:
            sending = max(worker.sending_seconds for worker in self.workers)
            lines.insert(3, f"time       {self.planning_seconds:.2f} s of planning, {sending:.2f} s of sending")
        if self.plan.why_nothing:
            lines.insert(2, f"shared     {self.plan.why_nothing}")
        for number, worker in enumerate(self.workers):
            what = f"{worker.read_tokens:,} prompt tokens, {worker.new_tokens:,} new ones"
            said = f"{worker.device}: {what} in {counted(worker.pieces, 'piece')}, busy {worker.busy:.0%}"
            lines.append(f"{'' if number else 'processes':11}{said}{f', {worker.lost}' if worker.lost else ''}")
        if self.parted_tokens:
            lines.append(f"parted     {self.parted_tokens:,} tokens of prefixes were computed in several processes")
        if self.scored_tokens:
            lines.append(f"scores     read from {len(self.plan.order):,} sequences that were run")
        if self.device_memory:
            lines.append(f"memory     {shown_size(self.device_memory)} at most on the device, all in all")
        if self.cached_tokens:
            lines.append(f"kept       {self.cached_tokens:,} prompt tokens came from an earlier call")
        if self.preemptions:
            lines.append(f"preempted  {self.preemptions:,} times, {self.recomputed_tokens:,} tokens computed again")
        if self.fused:
            lines.append(f"fused      {self.fused}")
        if self.graphs:
            lines.append(f"graphs     {self.graphs}")
        if self.states:
            lines.append(f"states     {self.states}")
        if self.images:
            lines.append(f"images     {self.images}")
        if self.drafted_tokens:
            right = f"{self.accepted_tokens:,} of them right ({self.accepted_tokens / self.drafted_tokens:.0%})"
            lines.append(f"drafts     {self.drafted_tokens:,} tokens were guessed, {right}{self._saved_by_drafts}")
        if self.idle_tokens:
            lines.append(f"idle       {self.idle_tokens:,} tokens were run for answers that had ended")
        if self.seed is not None:
            seed = self.seed if isinstance(self.seed, int) else "one for each prompt"
            lines.append(f"seed       {seed}")
        return "\n".join(lines)
