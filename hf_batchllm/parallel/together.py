"""The calls of a generator whose model several processes have together: the first leads, and all get the results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any, TypeVar

from ..config import BatchConfig
from ..engine.call import Call
from ..engine.generate_calls import GenerateCalls
from ..engine.job import Job
from ..engine.resources import Resources
from ..engine.scoring.score_calls import ScoreCalls
from ..engine.stream import Stream
from ..errors import BatchLLMError
from ..inputs.base_model import base_model
from ..model.inspection.fingerprint import digests_of_whole
from ..results.generations import Generation
from ..results.scores import ScoreResult
from .find_group import group_of
from .follower import Follower, FollowersCall
from .group import Group, Turn
from .leader import Leader, LeadersCall

T = TypeVar("T")


class TogetherCalls(GenerateCalls, ScoreCalls):
    """Alone with its model, a process runs its calls as ever."""

    _hands_on = True  # whether followers get the results
    _side: Leader | Follower | None = None

    def _resources_for(self, config: BatchConfig) -> Resources:
        group = group_of(base_model(self._model))
        if group is None:
            return super()._resources_for(config)
        if group.leads:
            self._side, self._kind_of_call = Leader(group, self._hands_on), LeadersCall
        else:
            self._side, self._kind_of_call = Follower(group), FollowersCall
        # An error reaches the others in their first call; in a pool it ends the processes.
        with self._call("makings of a BatchGenerator") if self._hands_on else nullcontext():
            resources = Resources(self._model, config, self._notices, self._side.devices)
            group.digests = digests_of_whole(self._model)
        return resources

    @property
    def _said_by_all(self) -> Callable[[T], list[T]] | None:
        """What all processes say that have the model together; each must ask. None where there is one."""
        return None if self._group is None else self._group.watch.exchange

    @property
    def _group(self) -> Group | None:
        return None if self._side is None else self._side.group

    @contextmanager
    def _call(self, kind: str) -> Iterator[Turn]:
        """A call of all. What the leader leaves in ``results`` of what this gives is what followers find there."""
        assert self._side is not None
        try:
            with self._side.call(kind) as turn:
                yield turn
        except (BatchLLMError, KeyboardInterrupt) as error:
            part = getattr(error, "result", None)
            if part is not None and not self._side.group.leads:
                self.interrupted = part
            raise
        if turn.results is not None:
            self.last_report = turn.results[1]

    def _new_call(self, **of_several: Any) -> Call:
        with nullcontext() if self._group is None else self._group.watch.on_devices():  # if the model has changed
            return super()._new_call(**of_several)

    def forget_prefixes(self) -> None:
        super().forget_prefixes()
        if isinstance(self._side, Follower):
            self._side.forget()

    def _generate(self, *given: Any) -> Any:
        return self._together("generate", super()._generate, *given)

    def _score(self, *given: Any) -> ScoreResult:
        result: ScoreResult = self._together("score", super()._score, *given)
        return result

    def _together(self, kind: str, run: Callable[..., Any], *given: Any) -> Any:
        if self._side is None:
            return run(*given)
        self._refuse_while_running()
        with self._call(kind) as turn:
            turn.results = run(*given), self.last_report  # which ends a follower's block
        return turn.results and turn.results[0]

    def _stream(self, *given: Any) -> Stream[Generation]:
        if self._side is None:
            return super()._stream(*given)
        self._refuse_while_running()
        with self._call("stream"):  # an error reaches the others when they ask for the first result
            return super()._stream(*given)

    def _run_stream(self, job: Job, strict: bool, progress: bool) -> Generator[Generation, None, None]:
        own = super()._run_stream(job, strict, progress)
        if self._side is None:
            yield from own
            return
        self._refuse_while_running()
        with self._call("stream") as turn:
            if isinstance(self._side, Follower):
                self.interrupted = None
                with self._taking() as call:
                    yield from self._side.follow(call, job)
            else:
                with closing(own):  # it is over before followers hear that it is
                    for result in own:
                        self._side.hand_out(result)
                        yield result
                turn.results = None, self.last_report
