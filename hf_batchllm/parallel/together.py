"""The calls of a generator whose model several processes have together: the first leads, and all get the results."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, TypeVar

from ..config import BatchConfig
from ..engine.devices import Devices
from ..engine.generate_calls import GenerateCalls
from ..engine.job import Job
from ..engine.resources import Resources
from ..engine.scoring.score_calls import ScoreCalls
from ..engine.stream import Stream
from ..errors import GenerationInterrupted
from ..inputs.base_model import base_model
from ..results.generations import Generation
from ..results.scores import ScoreResult
from .find_group import group_of
from .follower import Followed, Follower, FollowersCall
from .group import packed
from .leader import Leader, LeadersCall

T = TypeVar("T")


class TogetherCalls(GenerateCalls, ScoreCalls):
    """Alone with its model, a process runs its calls as ever."""

    _hands_on = True  # whether followers get the results
    _leader: Leader | None = None
    _follower: Follower | None = None

    def _resources_for(self, config: BatchConfig) -> Resources:
        group = group_of(base_model(self._model))
        if group is None:
            return super()._resources_for(config)
        if group.leads:
            self._leader, self._kind_of_call = Leader(group), LeadersCall
        else:
            self._follower, self._kind_of_call = Follower(group), FollowersCall
        with group.all_or_none():
            devices: Devices | None = self._follower if self._leader is None else self._leader.devices
            assert devices is not None
            return Resources(self._model, config, self._notices, devices)

    @property
    def _said_by_all(self) -> Callable[[T], list[T]] | None:
        """What all processes say that have the model together; each must ask. None where there is one."""
        devices = self._leader or self._follower
        return None if devices is None else devices.group.exchange

    def _generate(self, *given: Any) -> Any:
        return self._together(super()._generate, *given)

    def _score(self, *given: Any) -> ScoreResult:
        return self._together(super()._score, *given)

    def _together(self, run: Callable[..., T], *given: Any) -> T:
        if self._leader is not None:
            with self._leader.call() as finish:
                result = run(*given)
                finish(packed((result, self.last_report) if self._hands_on else (None, None)))
            return result
        if self._follower is None:
            return run(*given)
        follower = self._follower
        follower.start()
        with follower.group.watch.during_a_call():
            try:
                return run(*given)
            except Followed as followed:
                taken: T = self._taken(followed)
                return taken
            except BaseException as error:
                follower.fail(error)
                raise

    def _taken(self, followed: Followed) -> Any:
        if followed.error is None:
            result, self.last_report = followed.results
            return result
        if isinstance(followed.error, GenerationInterrupted):
            self.interrupted = followed.error.result
        raise followed.error from None

    def _stream(self, *given: Any) -> Stream[Generation]:
        devices = self._leader or self._follower
        if devices is None:
            return super()._stream(*given)
        with devices.group.all_or_none():
            return super()._stream(*given)

    def _run_stream(self, job: Job, strict: bool, progress: bool) -> Generator[Generation, None, None]:
        own = super()._run_stream(job, strict, progress)
        if self._leader is not None:
            with self._leader.call() as finish, closing(own):  # it is over before followers hear that it is
                for result in own:
                    self._leader.hand_out(packed(result))
                    yield result
                finish(packed((None, self.last_report)))
        elif self._follower is not None:
            yield from self._followed_stream(self._follower, job)
        else:
            yield from own

    def _followed_stream(self, follower: Follower, job: Job) -> Generator[Generation, None, None]:
        follower.start()
        with follower.group.watch.during_a_call():
            try:
                with self._taking() as call:
                    follower.meet(call, job)
                    yield from follower.results()
            except Followed as followed:
                self._taken(followed)
            except BaseException as error:
                follower.fail(error)
                raise
