"""One call of ``generate``, from checked prompts to finished requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property

from torch import nn

from ..config import BatchConfig
from ..errors import PromptError
from ..model.architecture import Architecture
from ..model.batch import BatchBuilder
from ..model.choose_backend import check_backend, fused_kernels, make_backend
from ..model.runner import ModelRunner
from ..notices import Notices
from ..patches.fusion import FusedLayers, Fusion
from ..planning.lineup import Lineup, line_up, most_pages_alone, pages_at_once
from ..planning.scheduler import Scheduler
from ..planning.sharing import make_plan
from ..planning.units import Branch, Request, Step
from ..results.run_report import RunReport
from ..results.sharing_plan import SharingPlan
from ..sampling.stopping import Endings
from .adapter_turns import AdapterTurns
from .beams.loop import BeamEngine
from .call_report import report_of
from .device_loop.run_ahead import RunAhead
from .extra_outputs import ExtraOutputs
from .job import Job
from .kv_memory import KVMemory
from .loop import Engine
from .progress import Progress, progress_bar
from .rehearsal import cannot_rehearse, largest_step, picking_bytes, stage
from .step_size import tokens_in_a_step
from .streamer import Feed
from .timekeeper import Timekeeper
from .tracebacks import forget_tensors
from .wiring import _GATHER_ROWS, beam_engine, launcher_for, scheduler_for, why_by_host


class Call:
    """Use it as a context: however the block ends, no page of the call stays behind."""

    def __init__(
        self,
        model: nn.Module,
        architecture: Architecture,
        config: BatchConfig,
        home: KVMemory,
        notices: Notices,
        fusion: Fusion,
    ) -> None:
        self.model = model
        self.architecture = architecture
        self.config = config
        self.home = home
        self.notices = notices
        self.fusion = fusion
        self.timekeeper = Timekeeper(ahead=architecture.device.type == "cuda")
        self._clock = time.time()  # the same moment, as ``generate`` measures ``max_time``
        self._opened = self._lined_up = self._started = self._complete = self._left = False
        self._runner: ModelRunner | None = None
        self._fused: FusedLayers | None = None
        self._ahead: RunAhead | None = None
        self._adapters: AdapterTurns | None = None
        self.engine: Engine | BeamEngine

    def begin(self, job: Job, strict: bool, extras: ExtraOutputs | None = None) -> None:
        """Plan, and line up in the cache. ``strict``: a prompt that does not fit is an error, not a record.

        ``recording``: of what is wanted beside tokens, if the work's options do not say it.
        """
        self.timekeeper.switch("planning")
        self.job = job
        self.extras = ExtraOutputs(job.options) if extras is None else extras
        self.home.start()
        check_backend(self.config, self.architecture.device, self.notices)
        samples, widths = job.runs, job.widths
        # Several samples of a prompt are that prompt several times: they share all of it but the last token.
        self._adapters = AdapterTurns(self.model, job.adapters)
        keyed = self._adapters.keyed(job.prompts, job.places)
        self.prompts = [prompt for prompt, count in zip(keyed, samples, strict=True) for _ in range(count)]
        limits = [limit for limit, count in zip(job.max_new_tokens, samples, strict=True) for _ in range(count)]
        self.plan = self._planned(limits)
        self.planning_seconds = self.timekeeper.seconds
        wanted = pages_at_once(self.prompts, self.plan, limits, self.config.page_size, widths)
        self.timekeeper.switch("setup")
        kernels = fused_kernels(self.config, self.architecture.device)
        if kernels is not None:  # before the KV cache takes the memory that is free
            self._fused = self.fusion.merge(kernels)
        self._opened = True
        longest = most_pages_alone(self.prompts, limits, self.config.page_size, widths)
        self.cache, self.storage = self.home.open(
            pages_wanted=max(wanted, 1),
            pages_needed=longest + self.plan.depth,  # ends of prefixes left empty
            beside=lambda most: self._beside_the_cache(wanted, most),
            results=self.extras.results_bytes(max(limits, default=0), self.architecture.vocab_size),
        )
        self.timekeeper.switch("planning")
        can_stop = [job.rules[place].can_stop for place in job.places]
        stops = [can for can, count in zip(can_stop, samples, strict=True) for _ in range(count)]
        watched = self.extras.watched
        self.lineup = line_up(
            self.prompts,
            self.plan,
            limits,
            self.cache,
            samples,
            can_stop=stops,
            reach=None if watched is None else watched.reach(self.prompts),
            widths=widths,
        )
        for request in self.lineup.requests:
            request.index = job.places[request.index]
        self._lined_up = True
        self._refuse_what_does_not_fit(self.lineup, strict)
        self.answers: Sequence[Request] = self.lineup.requests
        for seat, request in enumerate(self.lineup.requests):
            request.seat = seat
        if self.lineup.apart:
            self.notices(
                "apart",
                f"{self.lineup.apart:,} sequences share prefixes but fit into the KV cache only alone, so all of their "
                "tokens are computed: raise `kv_memory`, or set a smaller `page_size`",
            )
        self.timekeeper.switch("setup")
        self.scheduler: Scheduler = scheduler_for(self.config.scheduler, self.architecture.device)
        device = self.architecture.device
        backend = make_backend(self.config, device, self.storage, self.notices)
        self._runner = ModelRunner(self.model, self.architecture, backend, self._fused)
        self._runner.adapters = self._adapters.swap
        if watched is not None:
            watched.start(self.lineup.requests)
        if self.extras.prompts is not None:
            self._runner.record = self.timekeeper.around("tokens", self.extras.prompts.record)
        if widths is not None:
            self.engine = self._beams(job, self._runner)
            self.scheduler, self.answers = self.engine.scheduler, self.engine.answers
            return
        launcher, depth = launcher_for(
            self._runner,
            self.lineup.requests,
            job,
            self.config,
            self.scheduler,
            self.extras,
            self.timekeeper,
            self.notices,
        )
        self._ahead = launcher if isinstance(launcher, RunAhead) else None
        graphs = None if self._ahead is None else self._ahead.graphs
        builder = BatchBuilder(
            self.config.page_size,
            pin_memory=device.type == "cuda",
            short_chunk=backend.short_chunk,
            most_times=0 if graphs is None else graphs.most_times,
            wanted=None if watched is None else watched.wanted,
        )
        self.engine = Engine(self.scheduler, builder, launcher, self._endings(job), depth, self.timekeeper)
        self.timekeeper.switch("outside")  # results that are known already, a progress bar

    def _beams(self, job: Job, runner: ModelRunner) -> BeamEngine:
        if self.config.scheduler != "groups":
            self.notices("beams", "`scheduler` has no effect on a beam search, whose beams go on together")
        gather_rows = _GATHER_ROWS.get(self.architecture.device.type, 0)
        return beam_engine(
            runner, self.lineup, self.cache, job, self.extras, self.timekeeper, self._clock, gather_rows, self.notices
        )

    def _beside_the_cache(self, wanted: int, most: int) -> int | None:
        """Bytes that the call takes beside a KV cache of at most so many pages; None where that cannot be found out."""
        if cannot_rehearse(self.model):
            return None
        config, device = self.config, self.architecture.device
        vocabulary = self.architecture.vocab_size
        step = largest_step(self.prompts, self.plan, self._budget, config, (wanted, most))
        if self.job.widths is not None:
            step = replace(step, samples=min(step.tokens, step.samples * max(self.job.widths)))
        rows = self.extras.most_rows(vocabulary)
        if rows is None:
            job, penalised = self.job, self.job.penalised
            limits = any(options.config.min_new_tokens or options.config.min_length for options in job.kinds)
            by_host = why_by_host(self.model, self.architecture, job, self.extras) is not None
            copied = penalised > 0 or limits
            picking = picking_bytes(step.samples, vocabulary, penalised, copied=copied, by_host=by_host)
        else:  # nothing is picked, and all logits are the rehearsed step's
            step, by_host, picking = replace(step, samples=min(step.tokens, rows)), True, 0
        picking += self.extras.step_bytes(step.tokens, vocabulary)
        storage = stage(step, config.page_size)
        try:
            backend = make_backend(config, device, storage, self.notices)
            self._runner = ModelRunner(self.model, self.architecture, backend, self._fused)
            graphs = config.cuda_graphs and not by_host
            return self.home.rehearsals.beside_the_cache(self._runner, step, graphs, picking, self.home.memory)
        finally:
            storage.release()
            if self._runner is not None:
                self._runner.restore()  # it goes, with what it holds
                self._runner = None

    @cached_property
    def _budget(self) -> int:
        """The most tokens of a step."""
        budget = self.config.max_batch_tokens
        if budget is None:
            budget = tokens_in_a_step(self.model, self.architecture.device, self.home.within_reach())
        in_order = self.config.scheduler == "groups" and not self.config.keep_prefixes and self.job.adapters is None
        return self.extras.most_tokens(budget, self.architecture.vocab_size, self.plan if in_order else None)

    def _endings(self, job: Job) -> Endings:
        by_token = not getattr(self.scheduler, "ends_waiting", False)
        if by_token and any(rules.deadlines for rules in job.rules):
            self.notices(
                "max_time",
                f"{type(self.scheduler).__name__} cannot end requests that wait, so when the time is over each prompt "
                "still gets a token: see `ends_waiting` in hf_batchllm.Scheduler",
            )
        tensors, device = self.extras.tensors, self.architecture.device
        scores = None if tensors is None else tensors.scores_of
        return Endings(self.lineup.requests, job.rules, self._clock, device, by_token, rows=job.rows, scores=scores)

    def run(self, watch: Callable[[Step, int], None] | None = None) -> Iterator[Request]:
        """Requests as they finish. ``watch`` is told of every step, and how many tokens of answers it brought."""
        self._started = True
        self.timekeeper.start(self.cache)
        assert self._adapters is not None
        for turn, requests in enumerate(self._adapters.turns(self.lineup.requests)):
            self._start(requests, turn)
            yield from self.engine.run(watch) if self.job.feed is None else self._fed(self.job.feed, watch)
        if any(not request.done for request in self.answers):
            raise RuntimeError(f"{type(self.scheduler).__name__} ended the call before every request had finished")
        self.timekeeper.switch("outside")
        self._complete = True

    def _start(self, requests: list[Request], turn: int) -> None:
        """The scheduler begins with all requests, or with those of one adapter."""
        if len(requests) < len(self.lineup.requests):
            self.engine.endings.take_turn(requests)
        preempted = getattr(self.scheduler, "preemptions", 0) if turn else 0
        self.scheduler.start(requests, self.cache, self._budget)
        if preempted > getattr(self.scheduler, "preemptions", 0):  # it counts anew
            self.scheduler.preemptions = preempted
        if self._ahead is not None:
            self._ahead.start(requests, self._budget)

    def _fed(self, feed: Feed, watch: Callable[[Step, int], None] | None) -> Iterator[Request]:
        def told(step: Step, new_tokens: int) -> None:
            for request in self.lineup.requests:  # there is one at most
                feed.tell(request)
            if watch is not None:
                watch(step, new_tokens)

        for request in self.engine.run(told):
            with self.timekeeper.during("outside"):
                feed.end()
            yield request
        feed.end()

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        try:
            if self._adapters is not None:
                self._adapters.restore()
            if self._ahead is not None:
                self._ahead.close()
        except BaseException:
            self._complete = False
            raise
        finally:
            if self._complete:
                self._settle()
            elif self._opened:
                # Broken off half-way, nothing in the cache can be relied upon; refused before it began, all of it can.
                refused = self._lined_up and not self._started and kind in (None, PromptError, GeneratorExit)
                self._abandon(refused)
                if self.extras.tensors is not None:
                    self.extras.tensors.release()
                forget_tensors(error)
            self._left = True

    def _settle(self) -> None:
        assert self._adapters is not None
        if self._adapters.were_switched:  # between results: nobody knows what was computed with which
            self.home.clear()
        else:
            self.home.settle()

    def make_sure(self) -> None:
        """Leave, if an interrupt came in the way of that."""
        if self._left:
            return
        try:
            if self._ahead is not None:
                self._ahead.close()
        finally:
            self._let_go_of_the_model()
            self.home.clear()
            self._left = True

    def _let_go_of_the_model(self) -> None:
        if self._runner is not None:
            self._runner.restore()
        if self._adapters is not None:
            self._adapters.restore()
        if self._fused is not None:  # a traceback may keep this call, and it the weights that close() takes apart
            self._fused.release()

    def _abandon(self, refused: bool) -> None:
        self._let_go_of_the_model()
        try:
            if self._lined_up:
                for request in self.lineup.requests:
                    if request.base is not None or request.pages:
                        self.cache.retire(request, keep=False)
                if not refused:
                    self.cache.forget_kept()
        except BaseException:
            refused = False
            raise
        finally:
            if refused:
                self.home.settle()
            else:
                self.home.clear()

    def progress(self, wanted: bool | None) -> AbstractContextManager[Progress]:
        """A bar over what ``run`` will do."""
        to_compute = self.plan.computed_tokens - self.lineup.cached_tokens
        scores = self.extras.scores
        lengths = sum(len(each.prompt_ids) for each in self.answers) if scores is None else scores.prompt_tokens
        saving = 1 - to_compute / max(lengths, 1)
        return progress_bar(self.answers, to_compute, saving, wanted, scores=None if scores is None else scores.scores)

    def report(self) -> RunReport | None:
        """None if the call broke off before there was anything to report."""
        if not self._started:
            return None
        ahead = self._ahead
        report = report_of(
            self.engine,
            self.scheduler,
            self.cache,
            self.lineup,
            self.answers,
            self.plan,
            self.timekeeper,
            page_bytes=self.home.page_bytes,
            planning_seconds=self.planning_seconds,
            capture_seconds=0.0 if ahead is None or ahead.graphs is None else ahead.graphs.seconds,
            device_memory=self.home.memory.highest(),
            seed=self.job.seed,
            fused=self.fusion.summary if self._fused is not None else "",
            graphs=ahead.summary if ahead is not None else "",
        )
        return self.extras.in_report(report, self.lineup.requests)

    def _refuse_what_does_not_fit(self, lineup: Lineup, strict: bool) -> None:
        problems = {}
        for place, pages in lineup.too_long.items():
            request = lineup.requests[place]
            have, size = self.cache.num_pages * self.cache.page_size, pages * self.home.page_bytes
            grows, lower = f" and may grow by {request.max_new_tokens:,}", ", or lower `max_new_tokens`"
            if isinstance(request, Branch):
                grows += f" in each of {request.width:,} beams"
            elif request.max_new_tokens == 1:  # which is not run
                grows = lower = ""
            problems[request.index] = (
                f"has {len(request.prompt_ids):,} tokens{grows}; the KV cache has room for {have:,}: raise `kv_memory` "
                f"to {size:,} bytes at least{lower}"
            )
        if problems and strict:
            raise PromptError({**self.job.problems, **problems})
        self.job.problems.update(problems)
        if problems:
            fitting = [
                (prompt, request)
                for prompt, request in zip(self.prompts, lineup.requests, strict=True)
                if request.index not in problems
            ]
            self.prompts, lineup.requests = [prompt for prompt, _ in fitting], [request for _, request in fitting]
            # For the report and the bar: what cannot run shares nothing.
            self.plan = self._planned([request.max_new_tokens for request in lineup.requests])

    def _planned(self, limits: list[int]) -> SharingPlan:
        return replace(make_plan(self.prompts, self.config, limits), of_sequences=True)
