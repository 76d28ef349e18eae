"""One call of ``generate`` or ``score``, from a checked job to finished requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum, auto

from torch import nn

from ..config import BatchConfig
from ..errors import PromptError
from ..inputs.plain_values import plain, plain_options
from ..inputs.prompts import longest_uncut
from ..interrupts import Interrupts
from ..model.architecture import Architecture
from ..model.device_memory import is_device_error
from ..model.image_features import ImageFeatures
from ..model.invariance import refuse_calls_that_vary
from ..model.model_in_use import ModelInUse
from ..model.tensor_ranks import News
from ..notices import Notices
from ..patches.fusion import Fusion
from ..planning.base_scheduler import scheduler_name
from ..planning.call_plan import CallPlan
from ..planning.claims import Claims
from ..planning.lineup import Lineup
from ..planning.requests_and_prefixes import FinishReason, Request
from ..planning.step import Step
from ..results.run_report import RunReport
from ..sampling.device_logprobs import MOST_LIKELY
from ..sampling.earlier_answers import EarlierAnswers
from .adapter_turns import AdapterTurns
from .call_memory import CallMemory
from .call_outputs import CallOutputs
from .call_report import report_of
from .cost import StepCosts, cost_of_head
from .device_loop.steps_as_graphs import StepsAsGraphs
from .drafts.assistant import Assistant
from .drafts.assistant_model import Assistants
from .drafts.choose_drafts import open_assistant
from .invariance_trial import refuse_by_trial, try_wide_passes
from .job import Job
from .kv_memory import KVMemory
from .loop import Engine
from .price_of_states import price_of_states
from .progress import Progress, progress_bar
from .streamer import Feed
from .timekeeper import Timekeeper
from .too_long import why_too_long
from .tracebacks import forget_tensors
from .wiring import Wiring


class Stage(IntEnum):
    """How far a call has come."""

    NEW = auto()
    MEMORY = auto()  # the KV cache may hold pages of it
    LINED_UP = auto()  # nothing has been computed: what the cache kept from earlier calls is still good
    RUNNING = auto()
    COMPLETE = auto()


class Call:
    """Use it as a context: however the block ends, no page of the call stays behind."""

    def __init__(
        self,
        model: nn.Module,
        architecture: Architecture,
        config: BatchConfig,
        kv: KVMemory,
        notices: Notices,
        fusion: Fusion,
        earlier: EarlierAnswers,
        assistants: Assistants,
        claims: Claims | None = None,  # where several processes run the call
        news: News | None = None,  # where ranks have the model together, and the first one hears of something meanwhile
        began: float | None = None,  # when the call did, if that was elsewhere
    ) -> None:
        self._config = config
        self._claims, self._news = claims, news
        self._kv = kv
        self._earlier = earlier
        self._assistants = assistants
        self._assistant: Assistant | None = None
        self._notices = notices
        self._use = ModelInUse(model, architecture, config, fusion, notices)
        self.timekeeper = Timekeeper(ahead=architecture.device.type == "cuda")
        self._ranks = architecture.ranks
        self._began = began or time.time()
        self._stage = Stage.NEW
        self._interrupts = Interrupts()
        self._adapters: AdapterTurns | None = None
        self._wiring: Wiring | None = None
        self._images: ImageFeatures | None = None  # that prompts show
        self._earlier_preemptions = 0  # of adapters whose turn is over
        self.engine: Engine

    # -- before the first step -----------------------------------------------------------------------------------

    def begin(self, job: Job, outputs: CallOutputs, strict: bool) -> None:
        """Plan, open the memory, line up, wire. ``strict``: a prompt that does not fit is an error, not a record."""
        self.job = job
        self.outputs = outputs
        self.timekeeper.switch("planning")
        self._began = self._ranks.latest("when the call began", self._began)  # as ``generate`` measures ``max_time``
        self._must_agree()
        self._kv.start()
        self._use.check()
        self._plan_it()
        self.planning_seconds = self.timekeeper.seconds
        self.timekeeper.switch("setup")
        self._ranks.start()
        self._open_memory()
        self.timekeeper.switch("planning")
        self._line_up()
        self._refuse_what_does_not_fit(strict)
        self.timekeeper.switch("setup")
        self._wire()
        self.timekeeper.switch("outside")  # results that are known already, a progress bar

    def _must_agree(self) -> None:
        """Of ranks that run the model together each has to be asked for the same."""
        if self._ranks.size == 1:
            return  # to write it all down takes time
        job = self.job
        self._ranks.must_agree("prompts", (prompt.keys.tobytes() + repr(prompt.key).encode() for prompt in job.prompts))
        forms = None if job.grammars is None else plain(job.grammars.each)
        asked = job.places, job.max_new_tokens, job.seed, job.runs, job.widths, job.can_stop, forms
        self._ranks.must_agree("options", [repr(asked).encode(), repr(plain_options(job.options)).encode()])
        self._ranks.must_agree("settings of their BatchGenerator", [repr(plain(vars(self._config))).encode()])

    def _plan_it(self) -> None:
        job = self.job
        self._adapters = AdapterTurns(self._use, job.adapters)
        keyed = self._adapters.keyed(job.prompts, job.places)
        # Of a token that is copied nobody sees the logits; and beams part in the midst of pages.
        whole = self.outputs.watcher is not None or job.widths is not None
        self.plan = CallPlan(keyed, job.runs, job.max_new_tokens, job.widths, self._config, whole)
        self._images = ImageFeatures.of(self._use.model, self.plan.prompts, self.plan.sharing.order.tolist())
        images, beams = self._images is not None, self.job.widths is not None
        most = MOST_LIKELY if self.outputs.likeliest > MOST_LIKELY else None
        refuse_calls_that_vary(self._config, self._use.device, images=images, beams=beams, most_likely=most)
        if self._use.architecture.states:
            self.plan.ask_more_of_prefixes(price_of_states(self.plan, self._kv))

    def _open_memory(self) -> None:
        most, uncut = self._config.max_batch_tokens, longest_uncut(self.plan.prompts)
        if most is not None and most < uncut:
            self._notices(
                "uncut",
                f"an image takes {uncut:,} tokens, which see each other both ways and are computed in one step: "
                f"`max_batch_tokens` is {most:,}, and steps have up to {uncut:,}",
            )
        if self._images is not None and self._config.keep_prefixes and self._kv.cache is None:
            self._images.read_first()  # before the model is looked at: whether it changes decides what is kept
        self._use.fuse()
        refuse_by_trial(self._use, self._config)
        try_wide_passes(self._use, self._config, self.plan.sharing.computed_tokens, self._notices)
        # Before the KV cache takes the memory that is free.
        memory = self._kv.memory
        self._assistant = open_assistant(self.job, self._use, self._config, self._assistants, memory, self._notices)
        self._memory = CallMemory(self.job, self.plan, self.outputs, self._use, self._kv, self._config, self._images)
        self._stage = Stage.MEMORY
        self.cache, self._storage = self._memory.open()

    def _line_up(self) -> None:
        """Stand prefixes and requests on each other in the cache."""
        job, watcher = self.job, self.outputs.watcher
        reach = None if watcher is None else watcher.reach(self.plan.prompts)
        self.lineup: Lineup = self.plan.line_up(self.cache, job.can_stop, reach)
        for request in self.lineup.requests:
            request.index = job.places[request.index]
        self._stage = Stage.LINED_UP

    def _refuse_what_does_not_fit(self, strict: bool) -> None:
        requests = self.lineup.requests
        kv, model = self._kv, self._use.model
        problems = {
            place: why_too_long(requests[place], pages, kv, model) for place, pages in self.lineup.too_long.items()
        }
        named = {requests[place].index: why for place, why in problems.items()}
        if problems and strict:
            raise PromptError({**self.job.problems, **named})
        self.job.problems.update(named)
        if problems:
            refused = {place for place, request in enumerate(requests) if request.index in named}
            self.lineup.requests = [request for place, request in enumerate(requests) if place not in refused]
            self.plan.leave_out(refused)

    def _wire(self) -> None:
        requests, outputs = self.lineup.requests, self.outputs
        assert self._adapters is not None
        for seat, request in enumerate(requests):
            request.seat = seat
        if self.lineup.without_prefixes:
            self._notices(
                "apart",
                f"{self.lineup.without_prefixes:,} sequences share prefixes but fit into the KV cache only alone, so "
                "all of their tokens are computed: raise `kv_memory`, or set a smaller `page_size`",
            )
        runner = self._use.run_over(self._storage, self._adapters.swap)
        self._use.show(self._images)
        if self._images is not None:
            self._images.expect(requests)
        if outputs.watcher is not None:
            outputs.watcher.start(requests)
        if outputs.record_prompts is not None:
            runner.record = self.timekeeper.around("tokens", outputs.record_prompts)
        self._wiring = wiring = Wiring(
            self.job,
            outputs,
            self._use,
            runner,
            self.cache,
            requests,
            self._config,
            self.timekeeper,
            self._notices,
            self._began,
            self._memory.step_tokens,
            self._earlier,
            self._assistant,
        )
        self.engine = wiring.engine()
        self.answers: Sequence[Request] = self.engine.collector.answers

    @property
    def _graphs(self) -> StepsAsGraphs | None:
        return None if self._wiring is None else self._wiring.graphs

    # -- steps ---------------------------------------------------------------------------------------------------

    def run(self, watch: Callable[[Step, int], None] | None = None) -> Iterator[Request]:
        """Requests as they finish. ``watch`` is told of every step, and how many tokens of answers it brought."""
        self._stage = Stage.RUNNING
        self.timekeeper.start(self.cache)
        assert self._adapters is not None
        with self._ranks.interrupts(self._news) as meet:
            if self._ranks.size > 1:
                self.engine.meet, self.engine.after_waiting = meet, self._ranks.check
            else:
                self._interrupts.begin()
            try:
                for turn, requests in enumerate(self._adapters.turns(self.lineup.requests)):
                    self._use.put_back()  # the next adapter's steps put another one in
                    self._start(requests, turn)
                    yield from self.engine.run(watch) if self.job.feed is None else self._fed(self.job.feed, watch)
            finally:
                self._use.put_back()
        if any(not request.done for request in self.answers):
            raise RuntimeError(
                f"{scheduler_name(self.engine.scheduler)} ended the call before every request had finished"
            )
        self.timekeeper.switch("outside")
        self._stage = Stage.COMPLETE

    def _start(self, requests: list[Request], turn: int) -> None:
        """The scheduler begins with all requests, or with those of one adapter."""
        scheduler = self.engine.scheduler
        if len(requests) < len(self.lineup.requests):
            self.engine.collector.endings.take_turn(requests)
        before = scheduler.preemptions if turn else 0
        scheduler.claims = self._claims
        if self._claims is not None and not scheduler.asks_claims:
            requests = [request for request in requests if self._claimed(request, self._claims)]
        scheduler.start(requests, self.cache, self._memory.step_tokens)
        if self.engine.smaller.most is not None:
            scheduler.limit_steps(self.engine.smaller.most)
        if scheduler.preemptions < before:  # it counts anew
            self._earlier_preemptions += before
        if self._graphs is not None:
            self._graphs.start(requests, self._memory.step_tokens)

    def _claimed(self, request: Request, claims: Claims) -> bool:
        """For a scheduler that does not ask."""
        if claims.take(request.index):
            return True
        request.end(FinishReason.WITHDRAWN)
        self.cache.retire(request)
        return False

    def _fed(self, feed: Feed, watch: Callable[[Step, int], None] | None) -> Iterator[Request]:
        def told(step: Step, new_tokens: int) -> None:
            with self._use.users_turn():
                for request in self.lineup.requests:  # there is one at most
                    feed.tell(request)
            if watch is not None:
                watch(step, new_tokens)

        for request in self.engine.run(told):
            with self.timekeeper.during("outside"), self._use.users_turn():
                feed.end()
            yield request
        with self._use.users_turn():
            feed.end()

    @contextmanager
    def owner_in_control(self) -> Iterator[None]:
        """While a stream hands a result out. Graphs are replayed only if the model's weights are where they were."""
        self._use.put_back()
        self.timekeeper.switch("outside")
        self._interrupts.pause()
        with self._ranks.owner_in_control():
            yield
        if self._ranks.size == 1:
            self._interrupts.begin()
        if self._graphs is not None:
            self._graphs.owner_had_control()
        if self._assistant is not None:
            self._assistant.owner_had_control()
        self.timekeeper.switch("results")

    # -- the end -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        if self._ranks.size == 1:
            self._interrupts.leave()
        try:
            self._leave(kind, error)
        finally:
            self._interrupts.end(error)

    def _leave(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        complete = self._stage is Stage.COMPLETE
        self._use.put_back()
        try:
            if self._graphs is not None:
                self._graphs.close()
            if self._assistant is not None:
                self._assistant.close()
        except BaseException as second:
            complete = False
            if error is None or not is_device_error(second):  # a device that has failed says so again
                raise
        finally:
            if complete:
                self._settle()
            elif self._stage >= Stage.MEMORY:
                # Broken off half-way, nothing in the cache can be relied upon; refused before it began, all of it can.
                refused = self._stage is Stage.LINED_UP and kind in (None, PromptError, GeneratorExit)
                self._abandon(refused)
                self.outputs.release()
                forget_tensors(error)

    def _settle(self) -> None:
        assert self._adapters is not None
        if self._adapters.were_switched:  # between results: what was computed with which adapter is unknown
            self._kv.clear()
        else:
            self._kv.settle()

    def _abandon(self, refused: bool) -> None:
        self._use.restore()
        self._use.release()
        try:
            if self._stage >= Stage.LINED_UP:
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
                self._kv.settle()
            else:
                self._kv.clear()

    def adapter_for(self, index: int) -> str | None:
        """Which adapter answers the prompt."""
        return None if self._adapters is None else self._adapters.name_for(index)

    # -- what is said of it --------------------------------------------------------------------------------------

    def progress(self, wanted: bool | None) -> AbstractContextManager[Progress]:
        """A bar over what ``run`` will do."""
        to_compute = self.plan.sharing.computed_tokens - self.lineup.cached_tokens
        counts = self.outputs.counts
        lengths = sum(each.prompt_tokens for each in self.answers) if counts is None else counts.prompt_tokens
        saving = 1 - to_compute / max(lengths, 1)
        return progress_bar(
            self.answers,
            to_compute,
            saving,
            wanted if self._ranks.leads else False,
            self._step_costs,
            rows=len(self.answers) * min(1.0, self.cache.num_pages / max(self.plan.pages_at_once, 1)),
            scores=None if counts is None else counts.scores,
        )

    def _step_costs(self) -> StepCosts:
        use = self._use
        return StepCosts(use.device.type == "cuda", cost_of_head(use.model, use.architecture.vocab_size))

    def report(self) -> RunReport | None:
        """None if the call broke off before there was anything to report."""
        if self._stage < Stage.RUNNING:
            return None
        launcher = self._graphs
        assert self._wiring is not None
        report = report_of(
            self.engine,
            self._wiring.drafts,
            self.cache,
            self.lineup,
            self.answers,
            self.plan.sharing,
            self.timekeeper,
            preemptions=self._earlier_preemptions + self.engine.scheduler.preemptions,
            kv_bytes=(self._kv.peak_bytes, self._kv.whole_bytes),
            page_bytes=self._kv.page_bytes,
            planning_seconds=self.planning_seconds,
            capture_seconds=0.0 if launcher is None or launcher.graphs is None else launcher.graphs.seconds,
            device_memory=self._kv.memory.highest(),
            seed=self.job.seed,
            fused=self._use.fused_summary,
            graphs=launcher.summary if launcher is not None else "",
            slot_bytes=self._kv.architecture.slot_bytes,
            images="" if self._images is None else self._images.summary,
        )
        return self.outputs.in_report(report, self.lineup.requests)
