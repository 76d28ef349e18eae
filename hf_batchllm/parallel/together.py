"""The calls of a generator whose model several processes have together: the first leads, and all get the results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
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
from ..model.inspection.fingerprint import digests_of_whole
from ..results.generations import Generation
from ..results.scores import ScoreResult
from .find_group import group_of
from .follower import Follower, FollowersCall, Turn
from .group import Group
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
            self._leader, self._kind_of_call = Leader(group, self._hands_on), LeadersCall
        else:
            self._follower, self._kind_of_call = Follower(group), FollowersCall
        with group.all_or_none():
            devices: Devices | None = self._follower if self._leader is None else self._leader.devices
            assert devices is not None
            resources = Resources(self._model, config, self._notices, devices)
            digests = digests_of_whole(self._model)
        group.compare(digests)
        return resources

    @property
    def _said_by_all(self) -> Callable[[T], list[T]] | None:
        """What all processes say that have the model together; each must ask. None where there is one."""
        return None if self._group is None else self._group.exchange

    @property
    def _group(self) -> Group | None:
        either = self._leader or self._follower
        return None if either is None else either.group

    def _generate(self, *given: Any) -> Any:
        return self._together("generate", super()._generate, *given)

    def _score(self, *given: Any) -> ScoreResult:
        return self._together("score", super()._score, *given)

    def _together(self, kind: str, run: Callable[..., T], *given: Any) -> T:
        if self._group is not None:
            self._refuse_while_running()
        if self._leader is not None:
            with self._leader.call(kind) as finish:
                result = run(*given)
                finish((result, self.last_report))
            return result
        if self._follower is None:
            return run(*given)
        with self._following(self._follower, kind) as turn:
            run(*given)
        taken: T = turn.results and turn.results[0]
        return taken

    @contextmanager
    def _following(self, follower: Follower, kind: str) -> Iterator[Turn]:
        try:
            with follower.call(kind) as turn:
                yield turn
        except GenerationInterrupted as interrupt:
            self.interrupted = interrupt.result
            raise
        if turn.results is not None:
            self.last_report = turn.results[1]

    def _stream(self, *given: Any) -> Stream[Generation]:
        if self._group is None:
            return super()._stream(*given)
        self._refuse_while_running()
        with self._group.all_or_none():
            return super()._stream(*given)

    def _run_stream(self, job: Job, strict: bool, progress: bool) -> Generator[Generation, None, None]:
        own = super()._run_stream(job, strict, progress)
        if self._group is not None:
            self._refuse_while_running()
        if self._leader is not None:
            with self._leader.call("stream") as finish, closing(own):  # it is over before followers hear that it is
                for result in own:
                    self._leader.hand_out(result)
                    yield result
                finish((None, self.last_report))
        elif self._follower is not None:
            with self._following(self._follower, "stream"), self._taking() as call:
                yield from self._follower.follow(call, job)
        else:
            yield from own
