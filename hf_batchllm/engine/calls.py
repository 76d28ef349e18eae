"""What calls of every kind do: they take turns, and what had finished when one was broken off is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from torch import nn

from ..config import BatchConfig
from ..errors import GenerationInterrupted, GeneratorBusyError
from ..inputs.base_model import base_model, without_compile
from ..inputs.garbage_collection import FullCollectionsPaused
from ..inputs.tokenizer import TokenizerLoader
from ..model.device_memory import is_device_error
from ..model.inspection.architecture import Architecture
from ..notices import Notices
from ..results.generations import BatchResult
from ..results.run_report import RunReport
from ..results.scores import ScoreResult
from .call import Call
from .checks import JobChecks
from .devices import Devices
from .report import report_of
from .resources import Resources
from .unfinished import Finished, attach, note_of

T = TypeVar("T")
_STILL_RUNNING = "a call is running already, or a stream is still open: let it end (a stream also by its close())"


class Calls:
    """The calls of one generator. Those that have ended leave ``last_report`` and ``interrupted`` behind."""

    _kind_of_checks = JobChecks  # decides whether a call can be served
    _kind_of_call: type[Call] = Call
    _at_hand = True  # False behind a pipeline or ``accelerated``: no BatchGenerator is in the user's hands

    def __init__(self, model: nn.Module, tokenizer: Any, config: BatchConfig) -> None:
        self._notices = Notices()
        self._model = without_compile(model)
        self._tokenizer = TokenizerLoader(tokenizer, base_model(self._model))
        self._checks = self._kind_of_checks(self._model, self._tokenizer, self._notices)
        self._resources = self._resources_for(config)
        self._resources.check(is_compiled=self._model is not model)
        self.last_report: RunReport | None = None
        self.interrupted: BatchResult | ScoreResult | None = None
        self._is_running = False
        self._closed = False

    def _resources_for(self, config: BatchConfig) -> Resources:
        return Resources(self._model, config, self._notices, Devices())

    @property
    def architecture(self) -> Architecture:
        """What was read off the model: its layers, heads and attention."""
        return self._resources.architecture

    def close(self) -> None:
        """Give back all memory that is kept between calls. The generator cannot be used afterwards; the model can."""
        self._refuse_while_running(", then close()")
        self._resources.close()
        self._closed = True

    def forget_prefixes(self) -> None:
        """Drop the prefixes kept from earlier calls.

        Needed after a change that cannot be seen: inside a hook of your own, say, if it does nothing to most tokens.
        """
        self._refuse_while_running(", then forget_prefixes()")
        self._resources.kv.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except Exception as error:
            if kind is None or not (isinstance(error, GeneratorBusyError) or is_device_error(error)):
                raise  # otherwise an error is on its way that says more

    # -- one at a time -----------------------------------------------------------------------------------------

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise GeneratorBusyError("this BatchGenerator is closed: make a new one for the model")

    def _refuse_while_running(self, then: str = ". One call at a time") -> None:
        if self._is_running:
            raise GeneratorBusyError(f"{_STILL_RUNNING}{then}")

    @contextmanager
    def _taking(self) -> Iterator[Call]:
        """A call, while no other one runs."""
        self._refuse_if_closed()
        own = self.__dict__  # ``__setattr__`` is Python code, in which another thread or an interrupt may come
        if own["_is_running"]:
            raise GeneratorBusyError(f"{_STILL_RUNNING}. One call at a time")
        try:
            own["_is_running"] = True  # nothing comes between the test above and this
            with self._new_call() as call:
                yield call
        finally:
            own["_is_running"] = False

    def _new_call(self, **of_several: Any) -> Call:
        """``of_several``: what a call has that several processes run together."""
        self.last_report = None
        self._resources.look_again()
        return self._kind_of_call(self._resources, **of_several)

    # -- results -----------------------------------------------------------------------------------------------

    def _collected(self, body: Callable[[], T], finished: Finished[Any]) -> T:
        """What ``body`` gives; after an interrupt, what has ``finished`` by then is kept."""
        try:
            with FullCollectionsPaused():
                return body()
        except KeyboardInterrupt:
            pass  # what is raised below is without the frames that it came through
        except BaseException as error:
            self._keep(finished, error)
            raise
        part = finished.part(self._tokenizer.decode_if_loaded)
        if finished.expected:  # else the call had not begun, and what an earlier one left stays
            self.interrupted = part
        raise GenerationInterrupted(part, len(finished.results), finished.expected)

    def _keep(self, finished: Finished[Any], error: BaseException) -> None:
        """An error has broken a call off: what had finished goes with it. Before the first step there is nothing."""
        if finished.report is not None:
            self.interrupted = finished.part(self._tokenizer.decode_if_loaded)
            attach(error, self.interrupted, note_of(len(finished.results), finished.expected, self._at_hand))

    def _report(self, call: Call) -> RunReport | None:
        report = report_of(call)
        if report is not None:
            report.plan.add_labels(call.plan.prompts, self._tokenizer.decode_if_loaded)
        return report
