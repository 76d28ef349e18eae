"""The plain use of transformers' ContinuousBatchingManager: requests go in, results come out as they finish.

There is no thread: requests are computed when a result is asked for, all that wait by then as one list.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from transformers.generation.continuous_batching.requests import GenerationOutput

from ..errors import UnsupportedOptionError
from ..notices import warn_user
from .batch_requests import BatchRequest, RequestConfigs

_POLL = 0.1  # seconds between two looks, where somebody waits for requests of another thread


class Methods(Protocol):
    """What runs the requests of all managers of a model, and calls of its other methods."""

    def turn(self, manager: RequestManager | None = None) -> AbstractContextManager[None]: ...
    def run(
        self, requests: Sequence[BatchRequest], configs: RequestConfigs, batching: Any, progress: bool = False
    ) -> Generator[GenerationOutput, None, None]: ...
    @property
    def busy(self) -> Exception | None: ...
    def _attempt(self, serve: Callable[[], Any], original: Callable[[], Any]) -> Any: ...
    def _run_original(self, reason: Exception | None, original: Callable[[], Any]) -> Any: ...


class RequestManager:
    """Made by ``model.init_continuous_batching`` and ``model.continuous_batching_context_manager``.

    What it cannot do (the tokens of a request one by one, their times, handlers) is done by transformers' own manager,
    made by ``original``: it takes all requests from then on, and a warning says why.
    """

    def __init__(self, methods: Methods, configs: RequestConfigs, batching: Any, original: Callable[[], Any]) -> None:
        self._methods = methods
        self._configs = configs
        self._batching = batching
        self._original = original
        self._theirs: Any = None  # transformers' own manager, once it has taken over
        self._arrived = threading.Condition()
        self._waiting: list[BatchRequest] = []
        self._running: dict[str, BatchRequest] = {}  # results of the round that are not there yet, by their ids
        self._round: Generator[GenerationOutput, None, None] | None = None
        self._ready: deque[GenerationOutput] = deque()
        self._cancelled: set[str] = set()
        self._counter = 0
        self._started = self._stopping = False
        self.is_over = False  # destroyed, or given up

    @property
    def generation_config(self) -> Any:
        return self._configs.given

    @property
    def is_handed_over(self) -> bool:
        return self._theirs is not None

    def __getattr__(self, name: str) -> Any:
        theirs = self.__dict__.get("_theirs")
        if theirs is not None:
            return getattr(theirs, name)
        raise AttributeError(
            f"a manager under accelerated(model) has no `{name}`: it takes requests and gives results. For more, make "
            "the manager outside of the block"
        )

    # -- beginning and end -------------------------------------------------------------------------------------

    def is_running(self) -> bool:
        if self._theirs is not None:
            return bool(self._theirs.is_running())
        return self._started and not (self._stopping and self._has_none())

    def warmup(self) -> None:
        """Nothing: what has to be prepared is prepared when the first requests are known."""

    def start(self) -> None:
        if self._theirs is not None:
            self._theirs.start()
        elif self.is_over:
            raise RuntimeError("the manager was destroyed, or its accelerated(model) has ended: make a new one")
        self._started, self._stopping = True, False

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests. Those that are there are computed, with ``hard_stop`` they fail.

        ``timeout`` has no effect, and nothing is kept for a next session: a new manager costs nothing.
        """
        self._stopping = True
        if self._theirs is not None:
            self._theirs.stop(block=block, timeout=timeout, hard_stop=hard_stop)
        elif hard_stop:
            self._fail("the manager was stopped before this request had finished")
        elif block and self._started:
            self.join()
        with self._arrived:
            self._arrived.notify_all()

    def join(self, stop_trigger_time: float = 0.0, timeout: float | None = None) -> None:
        if self._theirs is not None:
            self._theirs.join(stop_trigger_time, timeout)
            return
        while self._compute_one():
            pass

    def destroy(self) -> None:
        if self._theirs is not None:
            self._theirs.destroy()
        elif self.is_running():
            self.stop()
        self.is_over = True

    def give_up(self, why: str) -> None:
        """The block ends: what has not finished fails. What transformers' own manager does is its own affair."""
        if self._theirs is None:
            self._fail(why)
        self._stopping = self.is_over = True
        with self._arrived:
            self._arrived.notify_all()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing runs between two results, so the model may be changed at any time."""
        if not self.is_running():
            raise RuntimeError("Cannot pause generation while no generation loop is running.")
        if self._theirs is not None:
            with self._theirs.pause():
                yield
        else:
            yield

    # -- requests ----------------------------------------------------------------------------------------------

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **logit_processor_kwargs: Any,
    ) -> str | None:
        """The id of the request, which is computed when results are asked for; None after ``stop``."""
        if streaming or record_timestamps:
            name = "streaming" if streaming else "record_timestamps"
            self._hand_over(UnsupportedOptionError(name, "is about single tokens, which come in bursts here"))
        if self._stopping:
            warn_user("the manager has stopped, so the request is dropped: add requests before stop()")
            return None
        if request_id is None:
            request_id = f"req_{self._take_numbers(1)}"
        if self._theirs is not None:
            given: str | None = self._theirs.add_request(
                input_ids,
                request_id,
                max_new_tokens,
                streaming,
                record_timestamps,
                eos_token_id,
                **logit_processor_kwargs,
            )
            return given
        request = BatchRequest(
            request_id, list(input_ids), self._configs.samples, max_new_tokens, eos_token_id, logit_processor_kwargs
        )
        with self._arrived:
            self._waiting.append(request)
            self._arrived.notify_all()
        return request_id

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        first = self._take_numbers(len(inputs))
        names = [f"req_{first + place}" for place in range(len(inputs))]
        for name, ids in zip(names, inputs, strict=True):
            self.add_request(ids, name, max_new_tokens, streaming, record_timestamps, **logit_processor_kwargs)
        return names

    def cancel_request(self, request_id: str) -> None:
        """A request that waits is not computed; the result of one that runs is thrown away."""
        if self._theirs is not None:
            self._theirs.cancel_request(request_id)
            return
        with self._arrived:
            self._waiting = [request for request in self._waiting if request.request_id != request_id]
            self._cancelled |= {name for name, running in self._running.items() if running.request_id == request_id}

    def _take_numbers(self, count: int) -> int:
        with self._arrived:
            first, self._counter = self._counter, self._counter + count
        return first

    # -- results -----------------------------------------------------------------------------------------------

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next result, or that of ``request_id``. It is computed now; ``timeout`` limits the wait for requests.

        None if there is none to come: the manager was not started, or has stopped, or the time is over.
        """
        while True:
            if (found := self._take(request_id)) is not None:
                return found
            if self._theirs is not None:
                output: GenerationOutput | None = self._theirs.get_result(request_id, timeout)
                return output
            if not self._started:
                return None
            if self._compute_one():
                continue
            with self._arrived:
                if self._stopping or not self._arrived.wait_for(self._has_news, timeout):
                    return None

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they finish, until the manager is stopped."""
        while self.is_running():
            if (output := self.get_result(timeout=_POLL)) is not None:
                yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        while self.is_running():
            output = self.get_result(request_id, timeout=_POLL)
            if output is not None:
                yield output
                if output.is_finished():
                    return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        self._hand_over(UnsupportedOptionError("register_result_handler", "needs a thread, and there is none here"))
        self._theirs.register_result_handler(request_id, callback)

    def _take(self, request_id: str | None) -> GenerationOutput | None:
        with self._arrived:
            for output in self._ready:
                if request_id is None or output.request_id == request_id:
                    self._ready.remove(output)
                    return output
        return None

    # -- rounds ------------------------------------------------------------------------------------------------

    def finish_round(self) -> None:
        """Compute what has begun: another call wants the model. Call it within a ``turn``."""
        while self._round is not None:
            self._advance()

    def _compute_one(self) -> bool:
        """Compute until a result is there, or transformers' own manager has taken over; False if nothing waits."""
        with self._methods.turn(self):
            before = len(self._ready)
            while self._theirs is None and len(self._ready) == before:
                if self._round is not None:
                    self._advance()
                elif not self._begin_round():
                    return False
            return len(self._ready) > before

    def _begin_round(self) -> bool:
        """Begin with all requests that wait; False if there are none."""
        with self._arrived:
            requests, self._waiting = self._waiting, []
            self._running = {name: request for request in requests for name in request.output_ids}
        if not requests:
            return False
        methods = self._methods
        if (reason := methods.busy) is not None:
            methods._run_original(reason, lambda: self._pass_on(requests))
            return True

        def serve() -> None:
            self._round = methods.run(requests, self._configs, self._batching)
            self._advance()  # what is refused is refused before the first result

        def original() -> None:
            self._round = None
            self._pass_on(requests)

        methods._attempt(serve, original)
        return True

    def _advance(self) -> None:
        assert self._round is not None
        output = next(self._round, None)
        if output is None or self._running.keys() <= {output.request_id}:
            next(self._round, None)  # there is no other one: the call ends
            self._round = None
        if output is None:
            return
        with self._arrived:
            self._running.pop(output.request_id, None)
            if output.request_id not in self._cancelled:
                self._ready.append(output)
            self._cancelled.discard(output.request_id)

    # -- transformers' own -------------------------------------------------------------------------------------

    def _hand_over(self, reason: UnsupportedOptionError) -> None:
        if self._theirs is None:
            with self._methods.turn():  # finishes the round
                with self._arrived:
                    requests, self._waiting = self._waiting, []
                self._methods._run_original(reason, lambda: self._pass_on(requests))

    def _pass_on(self, requests: Iterable[BatchRequest]) -> None:
        self._theirs = self._original()
        self._running.clear()
        if self._started:
            self._theirs.start()
        for request in requests:
            self._theirs.add_request(
                request.ids,
                request.request_id,
                request.max_new_tokens,
                eos_token_id=request.eos_token_id,
                **request.sampling,
            )

    def _has_news(self) -> bool:
        return bool(self._waiting) or self._stopping

    def _has_none(self) -> bool:
        return not self._waiting and self._round is None

    def _fail(self, why: str) -> None:
        with self._arrived:
            requests, self._waiting = self._waiting, []
            running, self._running = self._running, {}
            stopped, self._round = self._round, None
            left = running | {name: request for request in requests for name in request.output_ids}
            self._ready.extend(
                request.failed(name, why) for name, request in left.items() if name not in self._cancelled
            )
        if stopped is not None:
            stopped.close()
