"""Runs calls of ``generate`` and ``score``, one at a time, and hands their results out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeVar

from torch import nn
from transformers import GenerationConfig

from ..config import BatchConfig
from ..errors import GenerationInterrupted, GeneratorBusyError
from ..inputs.base_model import base_model, without_compile
from ..inputs.garbage_collection import FullCollectionsPaused
from ..inputs.option_checks import check_progress
from ..inputs.padded_batch import take_padded
from ..inputs.preparing import bars_wanted
from ..inputs.seeds import Seeds
from ..inputs.tokenizer import TokenizerLoader
from ..model.device_memory import is_device_error
from ..model.inspection.architecture import Architecture
from ..notices import Notices
from ..planning.requests_and_prefixes import Request
from ..planning.sharing import make_plan
from ..results.dataframes import index_of
from ..results.generations import BatchResult, Generation
from ..results.run_report import RunReport
from ..results.scores import ScoreResult
from ..results.sharing_plan import SharingPlan
from .call import Call
from .checks import JobChecks
from .extra_outputs import ExtraOutputs
from .job import Job
from .report import progress_of, report_of
from .resources import Resources
from .stream import Stream
from .tensor_results import as_tensors
from .unfinished import Finished, FinishedGenerations, attach, note_of

T = TypeVar("T")
_STILL_RUNNING = "a call is running already, or a stream is still open: let it end (a stream also by its close())"


class Calls:
    """The calls of one generator. Those that have ended leave ``last_report`` and ``interrupted`` behind."""

    _kind_of_checks = JobChecks  # decides whether a call can be served
    _logprobs_of_scores = False  # True: `logprobs` are of what tokens are drawn from, after processors
    _at_hand = True  # False behind a pipeline or ``accelerated``: no BatchGenerator is in the user's hands
    _decodes = True  # False where texts are made by whoever wants them

    def __init__(self, model: nn.Module, tokenizer: Any, config: BatchConfig) -> None:
        self._notices = Notices()
        self._model = without_compile(model)
        self._tokenizer = TokenizerLoader(tokenizer, base_model(self._model))
        self._checks = self._kind_of_checks(self._model, self._tokenizer, self._notices)
        self._resources = Resources(self._model, config, self._notices)
        self._resources.check(is_compiled=self._model is not model)
        self.last_report: RunReport | None = None
        self.interrupted: BatchResult | ScoreResult | None = None
        self._is_running = False
        self._closed = False

    @property
    def architecture(self) -> Architecture:
        """What was read off the model: its layers, heads and attention."""
        return self._resources.architecture

    def _generate(
        self,
        prompts: Any,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
        seed: Seeds | None,
        on_error: str,
        progress: bool | None,
        generate_kwargs: dict[str, Any],
    ) -> Any:
        finished = FinishedGenerations()
        given = prompts, generation_config, seed, on_error, progress, generate_kwargs
        return self._collected(partial(self._run_generate, finished, *given), finished)

    def _run_generate(
        self,
        finished: FinishedGenerations,
        prompts: Any,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
        seed: Seeds | None,
        on_error: str,
        progress: bool | None,
        generate_kwargs: dict[str, Any],
    ) -> Any:
        check_progress(progress)
        with self._taking() as call:
            padded = take_padded(prompts, generate_kwargs)
            given = prompts if padded is None else padded
            with bars_wanted(progress, call.timekeeper.during):
                job = self._checks.job(self.architecture, given, generation_config, seed, on_error, generate_kwargs)
            finished.expected, finished.index, self.interrupted = job.sequences, index_of(prompts), None
            outputs = ExtraOutputs(job.options, self._logprobs_of_scores)
            with bars_wanted(progress):
                call.begin(job, outputs, strict=on_error == "raise")
            try:
                with progress_of(call, progress) as bar:
                    for request in call.run(bar.step):
                        generation = self._generation(request, call, outputs, decode=padded is None)
                        finished.results[request.index, request.sample] = generation
                        bar.finish(request)
            finally:
                self.last_report = finished.report = self._report(call)
        rows = finished.results | {(failure.index, failure.sample): failure for failure in job.failures()}
        result = BatchResult([rows[key] for key in sorted(rows)], finished.report, self._tokenizer.decode_if_loaded)
        result._index = finished.index
        return result if padded is None else as_tensors(padded, result, job.options[0], call)

    def _stream(
        self,
        prompts: Any,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
        seed: Seeds | None,
        on_error: str,
        progress: bool,
        options: dict[str, Any],
    ) -> Stream[Generation]:
        with self._taking(), bars_wanted(progress):
            if take_padded(prompts, options) is not None:
                raise ValueError("stream() takes a list of prompts; padded tensors go to generate()")
            job = self._checks.job(self.architecture, prompts, generation_config, seed, on_error, options)
        return Stream(partial(self._run_stream, job, on_error == "raise", progress))

    def _run_stream(self, job: Job, strict: bool, progress: bool) -> Generator[Generation, None, None]:
        with self._taking() as call:
            self.interrupted = None
            outputs = ExtraOutputs(job.options, self._logprobs_of_scores)
            with bars_wanted(progress):
                call.begin(job, outputs, strict)
            yield from job.failures()
            try:
                with progress_of(call, progress) as bar:
                    for request in call.run(bar.step):
                        bar.finish(request)
                        generation = self._generation(request, call, outputs)
                        with call.owner_in_control():
                            yield generation
            finally:
                self.last_report = self._report(call)

    def _plan(self, prompts: Any, adapter: Any, options: dict[str, Any]) -> SharingPlan:
        self._refuse_if_closed()
        prepared = self._checks.prompts_to_plan(self.architecture, prompts, adapter, options)
        plan = make_plan(prepared, self._resources.config, 1)
        plan.add_labels(prepared, self._tokenizer.decode_if_loaded)
        return plan

    def close(self) -> None:
        """Give back all memory that is kept between calls. The generator cannot be used afterwards; the model can."""
        if self._is_running:
            raise GeneratorBusyError(f"{_STILL_RUNNING}, then close()")
        self._resources.close()
        self._closed = True

    def forget_prefixes(self) -> None:
        """Drop the prefixes kept from earlier calls.

        Needed after a change that cannot be seen: inside a hook of your own, say, if it does nothing to most tokens.
        """
        if self._is_running:
            raise GeneratorBusyError(f"{_STILL_RUNNING}, then forget_prefixes()")
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

    @contextmanager
    def _taking(self) -> Iterator[Call]:
        """A call, while no other one runs."""
        self._refuse_if_closed()
        own = self.__dict__  # ``__setattr__`` is Python code, in which another thread or an interrupt may come
        if own["_is_running"]:
            raise GeneratorBusyError(f"{_STILL_RUNNING}. One call at a time")
        try:
            own["_is_running"] = True  # nothing comes between the test above and this
            with self._new_call() as call, self.architecture.ranks.failing_together():
                yield call
        finally:
            own["_is_running"] = False

    def _new_call(self, **of_several: Any) -> Call:
        """``of_several``: what a call has that several processes run together."""
        self.last_report = None
        self._resources.look_again()
        return Call(self._resources, **of_several)

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
        self.interrupted = finished.part(self._tokenizer.decode_if_loaded)
        raise GenerationInterrupted(self.interrupted, len(finished.results), finished.expected)

    def _generation(self, request: Request, call: Call, outputs: ExtraOutputs, decode: bool = True) -> Generation:
        text = self._tokenizer.decode(request.generated) if decode and self._decodes else None
        prompt, adapter = call.job.prompt_as_passed(request.index), call.adapter_for(request.index)
        return outputs.generation(request, text, prompt, adapter)

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
