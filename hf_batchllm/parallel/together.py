"""The calls of a generator whose model several processes have together: the first leads, and all get the results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
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
        devices: Devices | None = self._follower if self._leader is None else self._leader.devices
        assert devices is not None
        # An error reaches the others in their first call; in a pool it ends the processes.
        with self._call("makings of a BatchGenerator") if self._hands_on else nullcontext():
            resources = Resources(self._model, config, self._notices, devices)
            group.digests = digests_of_whole(self._model)
        return resources

    @property
    def _said_by_all(self) -> Callable[[T], list[T]] | None:
        """What all processes say that have the model together; each must ask. None where there is one."""
        return None if self._group is None else self._group.watch.exchange

    @property
    def group_has_ended(self) -> bool:
        """Another process of this model has failed: this one is of no further use."""
        return self._group is not None and self._group.watch.failure is not None

    def _call(self, kind: str) -> AbstractContextManager[Any]:
        side = self._leader or self._follower
        assert side is not None
        return side.call(kind)

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
        with self._call("stream"):  # an error reaches the others when they ask for the first result
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
