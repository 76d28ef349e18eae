"""The parts of a call, put together: the scheduler, what runs the steps, and what ends the sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..config import BatchConfig
from ..model.batch_builder import BatchBuilder
from ..model.model_in_use import ModelInUse
from ..model.runner import ModelRunner
from ..model.tensor_ranks import TensorRanks
from ..notices import Notices
from ..planning.base_scheduler import BaseScheduler, scheduler_name
from ..planning.paged_cache import PagedCache
from ..planning.requests_and_prefixes import Branch, Request
from ..planning.scheduler import make_scheduler
from ..sampling.earlier_answers import EarlierAnswers
from ..sampling.forced_tokens import ForcedTokens
from ..sampling.stopping import Endings
from ..sampling.token_picking import TokenPicking
from .at_once import AtOnce
from .beams.candidates import BeamScores
from .beams.collector import BeamCollector, BeamEndings
from .beams.group import Answer, BeamGroup
from .beams.launcher import BeamLauncher
from .beams.scheduler import BeamScheduler
from .call_outputs import CallOutputs
from .collector import TokenCollector
from .device_loop.decode_graphs import DecodeGraphs, graphs_for
from .device_loop.run_ahead import RunAhead
from .device_loop.seats import Seats
from .device_loop.step_by_step import StepByStep
from .device_loop.steps_as_graphs import StepsAsGraphs
from .drafts.assistant import Assistant
from .drafts.choose_drafts import drafts_for, say_no_drafts
from .drafts.collector import DraftCollector
from .drafts.drafts import Drafts
from .drafts.scheduler import DraftingScheduler
from .job import Job
from .loop import Collector, Engine, Launcher
from .smaller_steps import SmallerSteps
from .step_size import times_in_a_row
from .timekeeper import Timekeeper

_DEPTH = {"cuda": 2}  # one step runs while the host prepares the next
_LONGEST_BURST = 256  # whatever `steps_per_sync` is: nothing is gained beyond, and each row keeps room for it
# A CPU's decode steps get cheaper by the row up to about a hundred rows.
_GATHER_ROWS = {"cpu": 128}


@dataclass
class Wiring:
    """What the parts of a call are made of. ``began``: when the call did, as ``max_time`` is measured."""

    job: Job
    outputs: CallOutputs
    use: ModelInUse
    runner: ModelRunner
    cache: PagedCache
    requests: Sequence[Request]
    config: BatchConfig
    timekeeper: Timekeeper
    notices: Notices
    began: float
    step_tokens: int  # the most of a step
    earlier: EarlierAnswers
    assistant: Assistant | None  # which guesses tokens
    jump: ForcedTokens | None = None  # over tokens that a grammar leaves no choice for
    graphs: StepsAsGraphs | None = None  # runs the steps, if it may do so as graphs; set as soon as it exists
    drafts: Drafts | None = None  # tokens that are guessed

    def engine(self) -> Engine:
        """The loop of the call."""
        return self._of_tokens() if self.job.widths is None else self._of_beams()

    def _of_tokens(self) -> Engine:
        """Where tokens are picked, or scores looked up."""
        scheduler = scheduler_for(self.config.scheduler, self.use.device)
        launcher, depth = self._launcher(scheduler)
        watcher, graphs = self.outputs.watcher, None if self.graphs is None else self.graphs.graphs
        builder = self.use.builder(
            most_times=0 if graphs is None else graphs.most_times,
            wanted=None if watcher is None else watcher.wanted,
        )
        endings = self._endings(scheduler)
        drafts = self.drafts = drafts_for(
            self.job, self.use, self.requests, picking_of(self.job, self.use), scheduler, launcher,
            self.outputs.tensors is not None, self.step_tokens, self.earlier, self.assistant, self.notices,
        )  # fmt: skip
        if drafts is not None:
            scheduler = DraftingScheduler(scheduler, drafts, self.timekeeper)
        criterias_turn = self.runner.control.users_turn if self.job.calls_criteria else nullcontext
        given = self.requests, scheduler, endings, self.timekeeper
        turns: dict[str, Any] = {"criterias_turn": criterias_turn, "schedulers_turn": self._schedulers_turn}
        if drafts is None:
            collector = TokenCollector(*given, jump=self.jump, **turns)
        else:
            by_host = launcher if isinstance(launcher, AtOnce) else None
            collector = DraftCollector(drafts, by_host, *given, jump=self.jump, **turns)
        return self._engine(scheduler, builder, launcher, collector, depth)

    def _engine(
        self, scheduler: BaseScheduler, builder: BatchBuilder, launcher: Launcher, collector: Collector, depth: int
    ) -> Engine:
        carries_states, alone = bool(self.use.architecture.states), self._ranks.size == 1
        smaller = SmallerSteps(scheduler, self.use.device, self.config.page_size, self.notices, carries_states, alone)
        return Engine(scheduler, builder, launcher, collector, depth, self.timekeeper, smaller, self._schedulers_turn)

    @property
    def _schedulers_turn(self) -> Callable[[], AbstractContextManager[None]]:
        return nullcontext if isinstance(self.config.scheduler, str) else self.runner.control.users_turn

    def _of_beams(self) -> Engine:
        """Where beams are searched for."""
        say_no_drafts(self.job, self.use.model, "no tokens are guessed in a beam search", self.notices)
        if self.config.scheduler != "groups":
            self.notices("beams", "`scheduler` has no effect on a beam search, whose beams go on together")
        job, tensors, device = self.job, self.outputs.tensors, self.use.device
        roots = [request for request in self.requests if isinstance(request, Branch)]
        groups: dict[Request, BeamGroup] = {root: self._group(root) for root in roots}
        beam_scores = BeamScores(
            self.use.model, job.options, [*groups.values()], job.seed, self.notices, tensors, self._ranks
        )
        owners_code = beam_scores.calls_owners_code or job.calls_criteria
        # What belongs to the owner may look at any of it, or change the model for the next step.
        depth = 1 if owners_code else _DEPTH.get(device.type, 1)
        scheduler = BeamScheduler(groups, _GATHER_ROWS.get(device.type, 0), depth)
        seats = Seats.none(device)
        graphs = self._graphs_without_picking(seats)
        launcher = BeamLauncher(
            groups, beam_scores, self.timekeeper, self.runner, seats, graphs, device, owners_code, job.picks_by_model
        )
        self.graphs = launcher
        scores = None if tensors is None else lambda root, made: tensors.scores_of(root, made, root.width)
        endings = BeamEndings(roots, job.rules, self.began, device, rows=job.rows, scores=scores, ranks=self._ranks)
        builder = self.use.builder(most_times=0 if graphs is None else 1)
        collector = BeamCollector(launcher, scheduler, endings, self.timekeeper)
        return self._engine(scheduler, builder, launcher, collector, depth)

    @property
    def _ranks(self) -> TensorRanks:
        return self.use.architecture.ranks

    def _group(self, root: Branch) -> BeamGroup:
        samples = self.job.options[root.index].num_return_sequences
        return BeamGroup(root, self.cache, [Answer(root, sample) for sample in range(samples)])

    def _launcher(self, scheduler: BaseScheduler) -> tuple[Launcher, int]:
        """And how many steps may be on their way at a time."""
        device, config, outputs = self.use.device, self.config, self.outputs
        launcher = outputs.launcher(self.runner, self.timekeeper)
        if launcher is not None:
            return launcher, _DEPTH.get(device.type, 1)
        depth = config.steps_per_sync
        if depth is None:
            depth = 1
            if device.type == "cuda":
                depth = 2 * self._ranks.least("steps in a row", times_in_a_row(self.use.model, device))
        picking = picking_of(self.job, self.use)
        longest = max((request.max_new_tokens for request in self.requests), default=1)
        reason = why_by_host(self.job, outputs, picking, depth)
        if reason is None:
            outputs.set_aside(longest, self.use.architecture.head_rows, device)
            reason = outputs.why_by_host
            if self._ranks.any("room to pick tokens", reason is not None):
                reason = reason or "another rank that runs this model has too little memory to do it on its device"
        if reason is not None:
            if device.type == "cuda":
                self.notices(f"host: {reason}", reason)
            alone = outputs.why_by_host is not None
            sampler = picking.by_host(outputs.record_scores, self.notices, self.requests, alone)
            # A step with a chunk is no graph: whether fewer steps are faster then has not been measured.
            if sampler.grammars and scheduler.takes_jumps and outputs.tensors is None and not picking.in_graphs:
                self.jump = ForcedTokens(sampler.grammars, self.job.rules, self.job.options)
            around, may_repeat = outputs.around(sampler), sampler.may_repeat
            if not picking.in_graphs:
                by_model = self.job.picks_by_model
                return AtOnce(self.runner, around, self.timekeeper, may_repeat, self._ranks, by_model), 1
            seats = Seats.of([frozenset()] * len(self.requests), device)
            graphs = self._graphs_without_picking(seats)
            self.graphs = StepByStep(
                self.runner, around if around is not sampler else sampler.without_waiting, sampler.prepare, may_repeat,
                seats, graphs, device, self.timekeeper, sampler.calls_owners_code or self.job.calls_criteria,
                self.job.picks_by_model, self.notices,
            )  # fmt: skip
            # A criterion of the owner's may do anything to the model before the next step.
            return self.graphs, 1 if self.job.calls_criteria else min(2, config.steps_per_sync or 2)
        pick, advance = picking.on_device(self.requests, outputs.wants_scores, outputs.tensors, self._ranks)
        seats = Seats.of([self.job.rules[request.index].stop_tokens for request in self.requests], device)
        # One burst runs, one waits for its turn.
        times = max(1, min(depth // 2, longest, _LONGEST_BURST)) if scheduler.runs_ahead else 1
        notes = outputs.notes(device, picking.kernels, pick.take_scores)
        noting = None if notes is None else notes.on_device
        graphs = graphs_for(config, self.runner, seats, pick, advance, times, self.notices, noting)
        if graphs is None and config.steps_per_sync is None:
            depth = _DEPTH.get(device.type, 1)
        if device.type == "cuda" and not scheduler.runs_ahead:
            self.notices(
                "scheduler",
                f"{scheduler_name(scheduler)} does not run ahead, so the device waits while a step is prepared: "
                "see `runs_ahead` in hf_batchllm.BaseScheduler",
            )
        self.graphs = RunAhead(self.runner, pick, seats, graphs, device, notes)
        return self.graphs, depth

    def _graphs_without_picking(self, seats: Seats) -> DecodeGraphs | None:
        """Their logits are for the host to pick from."""
        return graphs_for(self.config, self.runner, seats, None, None, 1, self.notices, None)

    def _endings(self, scheduler: BaseScheduler) -> Endings:
        job, tensors = self.job, self.outputs.tensors
        by_token = not scheduler.ends_waiting
        if by_token and any(rules.deadlines for rules in job.rules):
            self.notices(
                "max_time",
                f"{scheduler_name(scheduler)} cannot end requests that wait, so when the time is over each prompt "
                "still gets a token: see `ends_waiting` in hf_batchllm.BaseScheduler",
            )
        scores = None if tensors is None else tensors.scores_of
        return Endings(
            self.requests, job.rules, self.began, self.use.device, by_token, scores, rows=job.rows, ranks=self._ranks
        )


def scheduler_for(choice: str | BaseScheduler, device: torch.device) -> BaseScheduler:
    return make_scheduler(choice, _GATHER_ROWS.get(device.type, 0))


def picking_of(job: Job, use: ModelInUse) -> TokenPicking:
    return TokenPicking(
        use.model,
        use.device,
        use.architecture.vocab_size,
        job.options,
        job.places,
        job.samples,
        [len(prompt.ids) for prompt in job.prompts],
        job.max_new_tokens,
        job.seed,
        amd=use.kernels_by_name,
        grammars=job.grammars,
    )


def why_by_host(job: Job, outputs: CallOutputs, picking: TokenPicking, depth: int | None = None) -> str | None:
    """Why the host picks the tokens; None if the device does. ``depth``: how many steps may be on their way."""
    if outputs.why_by_host is not None:
        return outputs.why_by_host
    if job.widths is not None:
        return "beams are chosen by the host, which waits for each step"
    return picking.why_by_host(_DEPTH.get(picking.device.type, 1) if depth is None else depth)
