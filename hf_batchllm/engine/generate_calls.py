"""Runs calls of ``generate`` and ``stream``, and hands their results out; and plans."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from ..inputs.option_checks import check_progress
from ..inputs.padded_batch import take_padded
from ..inputs.preparing import bars_wanted
from ..planning.requests_and_prefixes import Request
from ..planning.sharing import make_plan
from ..results.dataframes import index_of
from ..results.generations import BatchResult, Generation
from ..results.sharing_plan import SharingPlan
from .call import Call
from .calls import Calls
from .extra_outputs import ExtraOutputs
from .job import Job
from .report import progress_of
from .stream import Stream
from .tensor_results import as_tensors
from .unfinished import FinishedGenerations


class GenerateCalls(Calls):
    _logprobs_of_scores = False  # True: `logprobs` are of what tokens are drawn from, after processors
    _decodes = True  # False where texts are made by whoever wants them

    def _generate(self, *given: Any) -> Any:
        """``given``: the arguments of ``generate`` in their order, the last ones as a dict."""
        finished = FinishedGenerations()
        return self._collected(partial(self._run_generate, finished, *given), finished)

    def _run_generate(
        self,
        finished: FinishedGenerations,
        prompts: Any,
        generation_config: Any,
        seed: Any,
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
        self, prompts: Any, generation_config: Any, seed: Any, on_error: str, progress: bool, options: dict[str, Any]
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
                        with call.user_in_control():
                            yield generation
            finally:
                self.last_report = self._report(call)

    def _plan(self, prompts: Any, adapter: Any, options: dict[str, Any]) -> SharingPlan:
        self._refuse_if_closed()
        prepared = self._checks.reader.to_plan(prompts, adapter, options, self.architecture.vocab_size)
        plan = make_plan(prepared, self._resources.config, 1)
        plan.add_labels(prepared, self._tokenizer.decode_if_loaded)
        return plan

    def _generation(self, request: Request, call: Call, outputs: ExtraOutputs, decode: bool = True) -> Generation:
        text = self._tokenizer.decode(request.generated) if decode and self._decodes else None
        prompt, adapter = call.job.prompt_as_passed(request.index), call.adapter_for(request.index)
        return outputs.generation(request, text, prompt, adapter)
