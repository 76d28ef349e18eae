"""One call of ``generate`` or ``score``, from a checked job to finished requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import IntEnum, auto
from functools import partial

from ..errors import PromptError
from ..interrupts import Interrupts
from ..model.device_memory import is_device_error
from ..planning.call_plan import CallPlan
from ..planning.claims import Claims
from ..planning.lineup import Lineup
from ..planning.requests_and_prefixes import Request
from .adapter_turns import AdapterTurns
from .call_memory import CallMemory
from .call_outputs import CallOutputs
from .job import Job
from .look import look_at_plan, try_model
from .loop import Engine, Watch
from .parts import Parts
from .resources import Resources
from .timekeeper import Timekeeper
from .too_long import leave_out_too_long
from .tracebacks import forget_tensors
from .wiring import wire


class Stage(IntEnum):
    """How far a call has come."""

    NEW = auto()
    MEMORY = auto()  # the KV cache may hold pages of it
    LINED_UP = auto()  # nothing has been computed: what the cache kept from earlier calls is still good
    RUNNING = auto()
    COMPLETE = auto()


class Call:
    """Use it as a context: however the block ends, no page of the call stays behind."""

    job: Job
    outputs: CallOutputs
    plan: CallPlan
    memory: CallMemory
    lineup: Lineup
    engine: Engine
    planning_seconds: float

    def __init__(
        self,
        resources: Resources,
        claims: Claims | None = None,  # where several processes run the call
        began: float | None = None,  # when the call did, if that was elsewhere
    ) -> None:
        self.resources = resources
        self.use = resources.model_in_use()
        self.timekeeper = Timekeeper(ahead=self.use.device.type == "cuda")
        self.stage = Stage.NEW
        self._claims = claims
        self._began = began or time.time()
        self._interrupts = Interrupts()
        self._adapters: AdapterTurns | None = None
        self._held = ExitStack()  # what the call gives back on the device, but for the cache

    # -- before the first step -----------------------------------------------------------------------------------

    def begin(self, job: Job, outputs: CallOutputs, strict: bool) -> None:
        """``strict``: a prompt that does not fit is an error, not a record."""
        self.job, self.outputs = job, outputs
        self.timekeeper.switch("planning")
        self._look()
        self._plan()
        self.planning_seconds = self.timekeeper.seconds
        self.timekeeper.switch("setup")
        self._open()
        self.timekeeper.switch("planning")
        self._line_up(strict)
        self.timekeeper.switch("setup")
        self._wire()
        self.timekeeper.switch("outside")  # results that are known already, a progress bar

    def _look(self) -> None:
        """Can this model be used as it is now?"""
        self.resources.kv.start()
        self.use.check()

    def _plan(self) -> None:
        """Find the prefixes that prompts share, and refuse what the plan shows to be refused."""
        job, resources = self.job, self.resources
        self._adapters = AdapterTurns(self.use, job.adapters)
        keyed = self._adapters.keyed(job.prompts, job.places)
        # A copied token skips the forward pass, so its logits are missing; and beams fork inside a page.
        whole = self.outputs.watcher is not None or job.widths is not None
        self.plan = CallPlan(keyed, job.runs, job.max_new_tokens, job.widths, resources.config, whole)
        self.memory = CallMemory(job, self.plan, self.outputs, self.use, resources)
        look_at_plan(job, self.plan, self.outputs, self.memory.images, resources)

    def _open(self) -> None:
        """Fuse the model's layers, try them, and take the memory of the call."""
        try_model(self.use, self.plan, self.memory.images, self.resources)
        self._held.callback(self.memory.close)
        self.memory.open_assistant()
        self.stage = Stage.MEMORY
        self.memory.open()

    def _line_up(self, strict: bool) -> None:
        """Stand prefixes and requests on each other in the cache, without those that do not fit."""
        job, watcher = self.job, self.outputs.watcher
        reach = None if watcher is None else watcher.reach(self.plan.prompts)
        self.lineup = self.plan.line_up(self.memory.cache, job.can_stop, reach)
        for request in self.lineup.requests:
            request.index = job.places[request.index]
        self.stage = Stage.LINED_UP
        leave_out_too_long(job.problems, self.plan, self.lineup, self.resources, strict)
        for seat, request in enumerate(self.lineup.requests):
            request.seat = seat

    def _wire(self) -> None:
        """Put the engine together."""
        requests, outputs, resources = self.lineup.requests, self.outputs, self.resources
        assert self._adapters is not None
        runner = self.use.run_over(self.memory.storage, self._adapters.swap)
        self.use.show(self.memory.images)
        if self.memory.images is not None:
            self.memory.images.expect(requests)
        if outputs.watcher is not None:
            outputs.watcher.start(requests)
        if outputs.record_prompts is not None:
            runner.record = self.timekeeper.around("tokens", outputs.record_prompts)
        self.engine = wire(
            Parts(
                job=self.job,
                outputs=outputs,
                devices=resources.devices,
                use=self.use,
                runner=runner,
                cache=self.memory.cache,
                requests=requests,
                config=resources.config,
                timekeeper=self.timekeeper,
                notices=resources.notices,
                began=self._began,
                step_tokens=self.memory.step_tokens,
                earlier=resources.earlier,
                assistant=self.memory.assistant,
            )
        )
        self._held.callback(self.engine.launcher.close)

    @property
    def answers(self) -> Sequence[Request]:
        return self.engine.collector.answers

    # -- steps ---------------------------------------------------------------------------------------------------

    def run(self, watch: Watch | None = None) -> Iterator[Request]:
        """Requests as they finish."""
        self.stage = Stage.RUNNING
        self.timekeeper.start(self.memory.cache)
        assert self._adapters is not None
        requests, run = self.lineup.requests, self.engine.run
        if self.job.feed is not None:
            run = partial(self.job.feed.along, run, requests, self._outside)
        self._interrupts.begin()
        try:
            for turn in self._adapters.turns(requests):
                self.use.put_back()  # the next adapter's steps put another one in
                if len(turn) < len(requests):
                    self.engine.collector.endings.take_turn(turn)
                self.engine.start(turn, self.memory.cache, self.memory.step_tokens, self._claims)
                yield from run(watch)
        finally:
            self.use.put_back()
        self.engine.check_finished()
        self.timekeeper.switch("outside")
        self.stage = Stage.COMPLETE

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """While code of the user's runs between steps."""
        with self.timekeeper.during("outside"), self.use.users_turn():
            yield

    @contextmanager
    def user_in_control(self) -> Iterator[None]:
        """While a stream hands a result out. Graphs are replayed only if the model's weights are where they were."""
        self.use.put_back()
        self.timekeeper.switch("outside")
        self._interrupts.pause()
        yield
        self._interrupts.begin()
        self.engine.launcher.user_had_control()
        self.memory.user_had_control()
        self.timekeeper.switch("results")

    # -- the end -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        self._interrupts.leave()
        try:
            self._leave(kind, error)
        finally:
            self._interrupts.end(error)

    def _leave(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        complete = self.stage is Stage.COMPLETE
        self.use.put_back()
        try:
            self._held.close()
        except BaseException as second:
            complete = False
            if error is None or not is_device_error(second):  # a device that has failed says so again
                raise
        finally:
            if complete:
                self._settle()
            elif self.stage >= Stage.MEMORY:
                # Broken off half-way, nothing in the cache can be relied upon; refused before it began, all of it can.
                refused = self.stage is Stage.LINED_UP and kind in (None, PromptError, GeneratorExit)
                self._abandon(refused)
                self.outputs.release()
                forget_tensors(error)

    def _settle(self) -> None:
        assert self._adapters is not None
        if self._adapters.were_switched:  # between results: what was computed with which adapter is unknown
            self.resources.kv.clear()
        else:
            self.resources.kv.settle()

    def _abandon(self, refused: bool) -> None:
        self.use.restore()
        self.use.release()
        try:
            if self.stage >= Stage.LINED_UP:
                cache = self.memory.cache
                for request in self.lineup.requests:
                    if request.base is not None or request.pages:
                        cache.retire(request, keep=False)
                if not refused:
                    cache.forget_kept()
        except BaseException:
            refused = False
            raise
        finally:
            if refused:
                self.resources.kv.settle()
            else:
                self.resources.kv.clear()

    def adapter_for(self, index: int) -> str | None:
        """Which adapter answers the prompt."""
        return None if self._adapters is None else self._adapters.name_for(index)
