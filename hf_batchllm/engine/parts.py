"""What the engine of a call is made of, and the engine, once its launcher, scheduler and collector are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ..config import BatchConfig
from ..model.batch_builder import BatchBuilder
from ..model.model_in_use import ModelInUse
from ..model.runner import ModelRunner
from ..notices import Notices
from ..planning.base_scheduler import BaseScheduler
from ..planning.paged_cache import PagedCache
from ..planning.requests_and_prefixes import Request
from ..sampling.text_lookup import EarlierAnswers
from .call_outputs import CallOutputs
from .devices import Devices
from .drafts.assistant import Assistant
from .job import Job
from .loop import Collector, Engine, Launcher
from .smaller_steps import SmallerSteps
from .timekeeper import Timekeeper


@dataclass(frozen=True)
class Parts:
    """``began``: when the call did, as ``max_time`` is measured."""

    job: Job
    outputs: CallOutputs
    devices: Devices
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

    @property
    def schedulers_turn(self) -> Callable[[], AbstractContextManager[None]]:
        """Around the scheduler, where that is the user's."""
        return nullcontext if isinstance(self.config.scheduler, str) else self.runner.control.users_turn

    def engine(
        self, scheduler: BaseScheduler, builder: BatchBuilder, launcher: Launcher, collector: Collector, depth: int
    ) -> Engine:
        carries_states, alone = bool(self.use.architecture.states), self.use.architecture.parts == 1
        smaller = SmallerSteps(scheduler, self.use.device, self.config.page_size, self.notices, carries_states, alone)
        return Engine(scheduler, builder, launcher, collector, depth, self.timekeeper, smaller, self.schedulers_turn)
